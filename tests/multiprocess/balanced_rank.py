"""One process of `test_balanced`.

Trains with `parallel.mode: balanced` and writes results to `folder`/rank-RANK.pt. One process
without a group computes the expected results.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from raytrain_opt.config.schema import Job
from raytrain_opt.data import load_shared_data
from raytrain_opt.results import Steps, TrainTotals
from raytrain_opt.train.data_parallel import Parallel, distribute
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches
from tests.support.process_group import gloo_group

CPU = torch.device("cpu")
MICRO_BATCHES = 8
LRS = (0.02,) * 3
SPEEDS = {1: [1.0], 2: [1.0, 3.0], 4: [1.0, 5.0, 1.5, 3.0]}
# Other shares of the same micro-batches: of the first rank only, of the last one, equal ones.
OTHER_SPEEDS: dict[int, dict[str, list[float]]] = {
    1: {},
    2: {"most first": [9.0, 1.0], "most last": [1.0, 9.0], "equal": [1.0, 1.0]},
    4: {"most first": [9, 1, 1, 1], "most last": [1, 2, 1, 9], "equal": [1.0] * 4},
}
STATISTICS = ("0.running_mean", "0.running_var", "0.num_batches_tracked")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": "SGD"},
    "LARS": {"optimizer": {"name": "LARS", "args": {"momentum": 0.9}}},
    "Muon": {"optimizer": {"name": "Muon", "args": {"momentum": 0.9}}, "average": {"decay": 0.5}},
    "bf16": {"optimizer": "SGD", "precision": "bf16", "parallel": {"gradient_buckets": [1, 2]}},
}


def network(num_classes: int, sample_shape: tuple[int, ...]) -> nn.Module:
    """Build a model with dropout, whose BatchNorm sees the images."""
    features = 8 * sample_shape[1] * sample_shape[2]
    return nn.Sequential(
        nn.BatchNorm2d(sample_shape[0], momentum=None),
        nn.Conv2d(sample_shape[0], 8, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(features, num_classes),
    )


def build(world_size: int, changes: dict[str, Any]) -> Learner:
    mode = {"mode": "balanced", "micro_batches": MICRO_BATCHES}
    values = {
        "model": network,
        "data": "digits",
        "epochs": 2,
        "global_batch_size": 64,
        "workers": {"count": world_size},
        "batch_ramp": {"steps": [{"epoch": 2, "factor": 2}]},
        "average": None,
        **changes,
        "parallel": {**mode, **changes.get("parallel", {})},
    }
    config = LearnerConfig.from_job(Job.model_validate(values))
    connect = distribute if world_size > 1 else Parallel
    return Learner(config, load_shared_data(config.data), CPU, connect)


def train(rank: int, world_size: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Train in both epochs; the second one again, and again with a stop and a new learner."""
    learner = build(world_size, changes)
    count = world_size if learner.config.parallel.mode == "balanced" else MICRO_BATCHES
    micro_batches = MicroBatches.for_rank(rank, [1.0] * world_size, count)
    totals = learner.train(1, Steps(0, LRS), micro_batches)
    learner.sync_batch_norm_stats()
    middle = learner.state(copy=True)
    digests = []
    for _ in range(2):
        learner.load(middle)
        grown = learner.train(2, Steps(0, LRS), micro_batches)
        learner.sync_batch_norm_stats()
        digests.append(learner.state(copy=True).digest())
    weights = {n: t.detach().clone() for n, t in learner.model.named_parameters()}
    learner.load(middle)
    learner.train(2, Steps(0, LRS), micro_batches, lambda done: done == 1)
    learner.sync_batch_norm_stats()
    resumed = build(world_size, changes)
    resumed.load(learner.state(copy=True))
    resumed.train(2, Steps(1, LRS[1:]), micro_batches)
    resumed.sync_batch_norm_stats()
    norms = grown.norms
    return {
        "samples": [totals.samples, grown.samples],
        "digests": digests,
        "weights": weights,
        "resumed": {n: t.detach().clone() for n, t in resumed.model.named_parameters()},
        "resumed_digest": resumed.state(copy=True).digest(),
        "statistics": {n: middle.tensors[f"model.{n}"].tensor() for n in STATISTICS},
        "norms": torch.tensor(norms.pairs) if norms is not None else None,
    }


def images() -> tuple[TensorDataset, TensorDataset]:
    """Make a user's Datasets, which loader processes read."""
    x = torch.rand(64 * 11, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, torch.arange(len(x)) % 10), TensorDataset(x[:9], torch.arange(9))


def train_with_a_slow_rank(
    mode: str, rank: int, world_size: int, **changes: Any
) -> dict[str, Any]:
    """Train measured shares; the last rank sleeps for each sample.

    On a busy machine another rank may be as slow for a second: phases are trained until the last
    rank has the smallest share, at most ten.
    """
    values = {"optimizer": "SGD", "parallel": {"mode": mode}, **changes}
    learner = build(world_size, values)
    if rank == world_size - 1 > 0:
        learner.model.register_forward_pre_hook(lambda _, args: time.sleep(0.02 * len(args[0])))
    micro_batches = MicroBatches.for_rank(rank, [1.0] * world_size, world_size)
    samples: list[list[int]] = []
    weights: list[dict[str, torch.Tensor]] = []
    smallest = False
    while len(samples) < 2 or (len(samples) < 10 and not smallest):
        by_rank = gather_samples(
            learner.train(1, Steps(0, (0.01,) * 7), micro_batches), rank, world_size
        )
        learner.sync_batch_norm_stats()
        smallest = (by_rank <= by_rank[-1]).sum().item() == 1
        samples.append(by_rank.tolist())
        weights.append({n: t.detach().clone() for n, t in learner.model.named_parameters()})
    start = learner.state(copy=True)
    stopped = learner.train(1, Steps(0, (0.01,) * 7), micro_batches, lambda done: done == 2)
    learner.sync_batch_norm_stats()
    state = learner.state(copy=True)
    learner.load(start)
    learner.train(1, Steps(0, (0.01,) * 7), micro_batches)
    at_once = {n: t.detach().clone() for n, t in learner.model.named_parameters()}
    learner.close()
    resumed = build(world_size, values)
    resumed.load(state)
    rest = resumed.train(1, Steps(2, (0.01,) * 5), micro_batches)
    resumed.close()
    parts = [gather_samples(totals, rank, world_size).tolist() for totals in (stopped, rest)]
    return {
        "samples": samples,
        "weights": weights[1],
        "parts": parts,
        "at_once": at_once,
        "resumed": {n: t.detach().clone() for n, t in resumed.model.named_parameters()},
    }


def gather_samples(totals: TrainTotals, rank: int, world_size: int) -> torch.Tensor:
    """Return the samples of each rank."""
    by_rank = torch.zeros(world_size, dtype=torch.int)
    by_rank[rank] = totals.samples
    if world_size > 1:
        dist.all_reduce(by_rank)
    return by_rank


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    with gloo_group(rank, world_size, folder):
        results: dict[str, Any] = {}
        for name, changes in OPTIMIZERS.items():
            speeds = {"speeds": SPEEDS[world_size]}
            parallel = {"parallel": {**changes.get("parallel", {}), **speeds}}
            results[name] = train(rank, world_size, {**changes, **parallel})
        for name, others in OTHER_SPEEDS[world_size].items():
            shares = {**OPTIMIZERS["SGD"], "parallel": {"speeds": others}}
            results[name] = train(rank, world_size, shares)
        sync = {**OPTIMIZERS["SGD"], "parallel": {"mode": "sync", "micro_batches": None}}
        results["sync"] = train(rank, world_size, sync)
        for mode in ("balanced", "auto"):
            results[mode] = train_with_a_slow_rank(mode, rank, world_size)
        data = {"name": images, "num_classes": 10, "normalize": "none", "loader_workers": 2}
        results["loaders"] = train_with_a_slow_rank("balanced", rank, world_size, data=data)
    torch.save(results, folder / f"rank-{rank}.pt")
