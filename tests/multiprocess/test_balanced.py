"""Unequal shares of every step, against one process that computes all micro-batches."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
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
from tests.support.process_group import Results, run_ranks

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
        learner.model.register_forward_pre_hook(lambda _, args: time.sleep(0.006 * len(args[0])))
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


def run_rank(rank: int, world_size: int, folder: Path) -> Results:
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
    return results


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Results:
    [results] = run_ranks(run_rank, 1, tmp_path_factory.mktemp("one") / "run")
    return results


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(run_rank, request.param, tmp_path_factory.mktemp("several") / "run")


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_unequal_shares_give_the_weights_of_one_process(
    ranks: list[Results], alone: Results, case: str
) -> None:
    """Dropout included; in two epochs, the second with a larger batch."""
    tolerance = 1e-2 if case == "bf16" else 2e-5
    for results in ranks:
        for name, expected in alone[case]["weights"].items():
            torch.testing.assert_close(
                results[case]["weights"][name], expected, rtol=tolerance, atol=tolerance
            )


def test_statistics_count_every_micro_batch_once(ranks: list[Results], alone: Results) -> None:
    """Means over all batches are exact, wherever they were computed; variances nearly."""
    mean, var, tracked = alone["SGD"]["statistics"].values()
    for results in ranks:
        own_mean, own_var, own_tracked = results["SGD"]["statistics"].values()
        torch.testing.assert_close(own_mean, mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(own_var, var, rtol=2e-3, atol=0)
        assert own_tracked == tracked // len(ranks)


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_given_speeds_repeat_to_the_bit_on_all_ranks(ranks: list[Results], case: str) -> None:
    digests = {digest for results in ranks for digest in results[case]["digests"]}
    assert len(digests) == 1


def test_each_rank_computes_its_share(ranks: list[Results]) -> None:
    shares = {2: ([2, 6], [4, 12]), 4: ([1, 4, 1, 2], [1, 8, 2, 5])}[len(ranks)]
    for epoch, micro_batches in enumerate(shares):
        samples = [results["SGD"]["samples"][epoch] for results in ranks]
        assert samples == [8 * len(LRS) * number for number in micro_batches]


@pytest.mark.parametrize("case", OTHER_SPEEDS[4])
def test_any_shares_give_the_weights_of_synchronous_training(
    ranks: list[Results], alone: Results, case: str
) -> None:
    samples = [results[case]["samples"][0] for results in ranks]
    assert (len(set(samples)) == 1) == (case == "equal")
    for results in ranks:
        for name, weights in results[case]["weights"].items():
            for expected in (results["sync"]["weights"], alone["sync"]["weights"]):
                torch.testing.assert_close(weights, expected[name], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_given_speeds_continue_in_a_new_learner_with_the_same_bits(
    ranks: list[Results], case: str
) -> None:
    """In the middle of an epoch; of more than two ranks, a new DDP may add in another order."""
    tolerance = 1e-2 if case == "bf16" else 2e-5
    for results in ranks:
        if len(ranks) == 2:
            assert results[case]["resumed_digest"] == results[case]["digests"][0]
        for name, expected in results[case]["weights"].items():
            resumed = results[case]["resumed"][name]
            torch.testing.assert_close(resumed, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", ["SGD", *OTHER_SPEEDS[4]])
def test_the_noise_scale_is_that_of_synchronous_training(
    ranks: list[Results], alone: Results, case: str
) -> None:
    """One process measures none; the ranks' pairs are the same whatever their shares are."""
    assert alone["SGD"]["norms"] is None
    for results in ranks:
        mean_square, square_of_mean = results[case]["norms"][0]
        assert mean_square > square_of_mean > 0
        assert torch.equal(results[case]["norms"], ranks[0][case]["norms"])
        torch.testing.assert_close(
            results[case]["norms"], results["sync"]["norms"], rtol=1e-4, atol=0
        )


@pytest.mark.parametrize("mode", ["balanced", "loaders", "auto"])
def test_a_slow_rank_gets_a_smaller_share(ranks: list[Results], mode: str) -> None:
    """Balanced from the sixth update on; auto from the next phase on."""
    first, *later = ranks[0][mode]["samples"]
    assert all(sum(samples) == 7 * 64 for samples in (first, *later))
    assert later[-1][-1] < min(later[-1][:-1])
    if mode == "auto":
        assert len(set(first)) == 1


@pytest.mark.parametrize("mode", ["balanced", "loaders", "auto"])
def test_measured_shares_give_equal_weights_on_all_ranks(
    ranks: list[Results], alone: Results, mode: str
) -> None:
    first, *others = (results[mode]["weights"] for results in ranks)
    for other in others:
        assert all(torch.equal(first[name], value) for name, value in other.items())
    if mode != "auto":  # its first phase has other micro-batches, with other dropout
        for name, expected in alone[mode]["weights"].items():
            torch.testing.assert_close(first[name], expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("mode", ["balanced", "loaders", "auto"])
def test_a_stopped_phase_continues_with_its_shares_in_a_new_process(
    ranks: list[Results], mode: str
) -> None:
    """Each sample counts once, so that only the order of additions differs."""
    stopped, rest = ranks[0][mode]["parts"]
    assert (sum(stopped), sum(rest)) == (2 * 64, 5 * 64)
    assert [samples / 2 for samples in stopped] == [samples / 5 for samples in rest]
    assert rest[-1] < max(rest)
    for results in ranks:
        for name, expected in results[mode]["at_once"].items():
            torch.testing.assert_close(
                results[mode]["resumed"][name], expected, rtol=1e-4, atol=2e-5
            )


# A worker dies within a step: the others still have the steps before, and these are enough.

DEATH_CASES = ("SGD", "Muon")
STEPS, DEATH = 2 * len(LRS), 3
RATES = (0.02,) * STEPS


def continue_alone(case: str, state: Any) -> dict[str, torch.Tensor]:
    """Train the steps that are left of the phase in one process; return its weights."""
    learner = build(1, OPTIMIZERS[case])
    learner.load(state)
    learner.train(1, Steps(DEATH, RATES[DEATH:]), MicroBatches(range(1), 1))
    return weights_of(learner)


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.model.named_parameters()}


def train_alone(case: str) -> dict[str, Any]:
    learner = build(1, OPTIMIZERS[case])
    micro_batches = MicroBatches(range(1), 1)
    totals = learner.train(1, Steps(0, RATES), micro_batches, lambda done: done == DEATH)
    return {
        "totals": numbers(totals),
        "weights": weights_of(learner),
        "end": continue_alone(case, learner.state(copy=True)),
    }


def lose_the_last_rank(case: str, rank: int, world_size: int) -> dict[str, Any]:
    """Train until the last rank leaves within a step; return what the others still have."""
    learner = build(world_size, OPTIMIZERS[case])
    assert learner.config.parallel.measures_shares
    assert learner.end_broken_phase() is None

    def on_step(done: int) -> None:
        if done == DEATH and rank == world_size - 1:
            os._exit(0)

    micro_batches = MicroBatches.for_rank(rank, [1.0] * world_size, world_size)
    with pytest.raises(RuntimeError, match="gloo"):
        learner.train(1, Steps(0, RATES), micro_batches, on_step)
    totals = learner.end_broken_phase()
    assert totals is not None
    weights, state = weights_of(learner), learner.state(copy=True)
    end = continue_alone(case, state)
    return {"totals": numbers(totals), "weights": weights, "end": end}


def numbers(totals: TrainTotals) -> tuple[int, int, int, float]:
    return totals.steps, totals.samples, totals.skipped, totals.loss


def run_phase_with_death(rank: int, world_size: int, folder: Path) -> Results:
    assert MICRO_BATCHES % world_size == 0
    case = folder.name
    return train_alone(case) if world_size == 1 else lose_the_last_rank(case, rank, world_size)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", DEATH_CASES)
def test_what_is_left_continues_as_if_nobody_had_died(
    case: str, world_size: int, tmp_path: Path
) -> None:
    for folder in ("alone", "several"):
        (tmp_path / folder).mkdir()
    [alone] = run_ranks(run_phase_with_death, 1, tmp_path / "alone" / case)
    *others, dead = run_ranks(run_phase_with_death, world_size, tmp_path / "several" / case)
    assert dead == {}
    for results in others:
        *counts, loss = results["totals"]
        assert counts == [DEATH, DEATH * 64, 0]
        assert loss == pytest.approx(alone["totals"][-1], rel=0.2)  # that of its own samples
        for name in ("weights", "end"):
            for parameter, expected in alone[name].items():
                torch.testing.assert_close(
                    results[name][parameter], expected, rtol=2e-5, atol=2e-5
                )
