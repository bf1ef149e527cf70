"""The same bits on any number of workers: digests of five trainings, and what they cost.

    python -m benchmarks.same_bits [--pairs 9] [--steps 3]

Each job is trained in each cell: in one process without a group, by 1, 2, 3 and 4 gloo workers, by
3 workers with random unequal shares, with a kill and a resume, and by a number of workers that
changes. Prints one JSON object: `cells` is the number of trainings, `equal` how many ended with
the digest of their job's first one (state and losses), `step_ratio` by number of workers the
median time of steps of ResNet-18 on images of 32 x 32 over those of DDP with its all-reduce,
in interleaved pairs, and `ratios` all pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.in_process import open_learner
from raytrain_opt import Job
from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.updates import ParallelSection
from raytrain_opt.optim.epoch_steps import ramp_factor
from raytrain_opt.results import Steps
from raytrain_opt.train import micro_batches
from raytrain_opt.train.data_parallel import DataParallel, Parallel
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.micro_batches import MicroBatches

MICRO_BATCHES = 8


class Transformer(nn.Module):
    """A small transformer over the rows of an image, with dropout."""

    def __init__(self, num_classes: int, sample_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.inputs = nn.Linear(sample_shape[-1], 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.outputs = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.outputs(self.layer(self.inputs(x[:, 0])).mean(1))
        return outputs


JOBS: dict[str, dict[str, Any]] = {
    "batch norm": {"optimizer": "Muon", "average": 0.5},
    "transformer": {"model": Transformer, "optimizer": {"name": "AdamW", "clip_norm": 0.1}},
    "growing batch": {
        "optimizer": "LARS",
        "batch_ramp": [{"epoch": 2, "factor": 2}],
        "parallel": {"micro_batches": MICRO_BATCHES, "compression": "bf16"},
    },
    "uneven": {"data": {"name": "digits", "drop_last": False}},
    "fine-tuning": {"model": {"name": "small_cnn", "freeze": ["[0134].*"]}},
}


@dataclass(frozen=True)
class Stage:
    """Processes that train one of the two phases of a job, or both."""

    workers: int  # 0: one process without a group
    phases: range = range(2)
    shares: int | None = None  # seed of random unequal ones
    killed: bool = False  # in the phase after these


CELLS: dict[str, list[Stage]] = {
    "in process": [Stage(0)],
    **{f"{workers} workers": [Stage(workers)] for workers in (1, 2, 3, 4)},
    "random shares": [Stage(3, shares=1)],
    "killed": [Stage(2, range(1), killed=True), Stage(2, range(1, 2))],
    "elastic": [Stage(4, range(1)), Stage(2, range(1, 2), shares=2)],
}


def job_of(changes: dict[str, Any]) -> Job:
    """Return a job of the digits with these sections."""
    return Job.model_validate(
        {
            "model": "small_cnn",
            "data": "digits",
            "epochs": 2,
            "global_batch_size": 64,
            "workers": {"count": 1},
            "learning_rate": {"policy": "schedule", "shape": "constant"},
            "parallel": {"micro_batches": MICRO_BATCHES},
            "average": None,
            **changes,
        }
    )


def train_cell(name: str, stages: Sequence[Stage], steps: int) -> str:
    """Train a job in a cell; return the digest of its end and its losses."""
    with tempfile.TemporaryDirectory() as folder:
        for number, stage in enumerate(stages):
            run_group(_train, max(1, stage.workers), (name, stage, steps, number, folder))
        _, digest, losses = pickle.loads((Path(folder) / "state").read_bytes())
        return f"{digest} {losses}"


def _train(rank: int, name: str, stage: Stage, steps: int, number: int, folder: str) -> None:
    """Continue from the state in the folder, and leave the new one there."""
    file, connect = Path(folder) / "state", DataParallel if stage.workers else Parallel
    torch.set_num_threads(1)  # equal bits need equal kernels
    if stage.workers:
        join(rank, stage.workers, Path(folder) / f"meeting-{number}")
    job = job_of(JOBS[name])
    learner = open_learner(job, connect)
    losses: tuple[float, ...] = ()
    if number:
        state, _, losses = pickle.loads(file.read_bytes())
        learner.load(state)
    with _random_shares(stage):
        for phase in stage.phases:
            losses += _phase(learner, phase, steps)
        state = learner.state(copy=True)
        if stage.killed:
            _phase(learner, stage.phases.stop, steps)
    if rank == 0:
        file.write_bytes(pickle.dumps((state, state.digest(), losses)))
    if stage.workers:
        dist.barrier()
    os._exit(0)  # as a killed process: nothing is said to the others


def _phase(learner: Learner, phase: int, steps: int) -> tuple[float, ...]:
    """Train the last steps of an epoch."""
    config = learner.config
    size = config.global_batch_size * ramp_factor(config.batch_ramp, phase + 1)
    in_epoch = learner.info.train_size / size
    end = int(in_epoch) if config.data.drop_last else -int(-in_epoch // 1)
    trained = Steps(end - steps, tuple(0.05 / (1 + phase + step) for step in range(steps)))
    totals = learner.train(phase + 1, trained, MicroBatches.all(MICRO_BATCHES))
    learner.finish_phase()
    return totals.losses


def _random_shares(stage: Stage) -> Any:
    def split(count: int, speeds: Sequence[float]) -> list[range]:
        cuts = sorted(random.Random(stage.shares).sample(range(1, count), len(speeds) - 1))
        ends = [*cuts, count]
        return [range(a, b) for a, b in zip([0, *cuts], ends, strict=True)]

    if stage.shares is None:
        return nullcontext()
    return mock.patch.object(micro_batches, "divide_by_speed", split)


def run_group(function: Callable[..., None], workers: int, arguments: tuple[Any, ...]) -> None:
    """Call a function with each rank and the arguments, in processes of their own."""
    context = get_context("forkserver")  # from a process that has imported torch
    context.set_forkserver_preload(["benchmarks.same_bits", "torch._dynamo"])
    processes = [context.Process(target=function, args=(r, *arguments)) for r in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * workers


def join(rank: int, workers: int, meeting: Path) -> None:
    """Join a process group."""
    dist.init_process_group("gloo", init_method=meeting.as_uri(), rank=rank, world_size=workers)


def _time_steps(rank: int, workers: int, pairs: int, folder: str) -> None:
    """Time steps of ResNet-18, alternately with the sums along the tree and an all-reduce."""
    from raytrain_opt.models.networks import cifar_resnet18

    torch.set_num_threads(1)
    join(rank, workers, Path(folder) / "meeting")
    torch.manual_seed(0)
    models = [cifar_resnet18(num_classes=10, sample_shape=(3, 32, 32)) for _ in range(2)]
    tree = DataParallel(models[0], ParallelSection())
    tree.begin_phase(MicroBatches.all(workers))
    plain = DistributedDataParallel(models[1], gradient_as_bucket_view=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, foreach=True) for m in models]
    x, y = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))

    def tree_step() -> None:
        optimizers[0].zero_grad()
        with tree.accumulate(rank):
            torch.autograd.backward(nn.functional.cross_entropy(tree.forward(x), y) / workers)
        tree.end_backward()
        optimizers[0].step()
        tree.after_step()

    def plain_step() -> None:
        optimizers[1].zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(plain(x), y))
        optimizers[1].step()

    def seconds(step: Callable[[], None]) -> float:
        dist.barrier()
        started_s = monotonic_s()
        for _ in range(2):
            step()
        dist.barrier()
        return monotonic_s() - started_s

    for step in (tree_step, plain_step):
        seconds(step)
    ratios = []
    for pair in range(pairs):
        order = (tree_step, plain_step) if pair % 2 else (plain_step, tree_step)
        times = {step: seconds(step) for step in order}
        ratios.append(round(times[tree_step] / times[plain_step], 3))
    if rank == 0:
        (Path(folder) / "ratios").write_text(json.dumps(ratios))
    dist.destroy_process_group()


def step_ratios(workers: int, pairs: int) -> list[float]:
    """Return the times of steps with sums along the tree over those with an all-reduce."""
    with tempfile.TemporaryDirectory() as folder:
        run_group(_time_steps, workers, (workers, pairs, folder))
        ratios: list[float] = json.loads((Path(folder) / "ratios").read_text())
        return ratios


def main() -> None:
    """Train all cells, time the steps, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="of each phase")
    args = parser.parse_args()
    digests = {
        job: {cell: train_cell(job, stages, args.steps) for cell, stages in CELLS.items()}
        for job in JOBS
    }
    same = [d == by_cell["in process"] for by_cell in digests.values() for d in by_cell.values()]
    ratios = {workers: step_ratios(workers, args.pairs) for workers in (2, 4)}
    result = {
        "cells": len(same),
        "equal": sum(same),
        "step_ratio": {workers: statistics.median(r) for workers, r in ratios.items()},
        "ratios": ratios,
        "load": os.getloadavg()[0],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
