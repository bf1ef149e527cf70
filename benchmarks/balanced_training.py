"""Throughput of shares by speed against equal ones, with workers of different speeds.

Each worker is a process with the product's learner, DDP over gloo and the gradients of ResNet-8
(width 64, 1.2 million parameters). **Computing is simulated**: forward and backward pass of a
micro-batch end after a time in proportion to its samples, which the process sleeps, because 4 real
computations on 2 cores would measure the cores. Every
worker's equal share of a step takes `seconds` at speed 1. The timer covers a phase of `steps`
steps; `by_speed` has `MICRO_BATCHES` per worker, and measures the speeds in `WARM_UP` steps first.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.in_process import open_learner
from raytrain_opt import Job
from raytrain_opt.clock import monotonic_s
from raytrain_opt.models import build_model
from raytrain_opt.results import Steps
from raytrain_opt.train.data_parallel import DataParallel
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.micro_batches import MicroBatches

WARM_UP, SAMPLES_PER_WORKER, MICRO_BATCHES, SLOWER = 10, 128, 16, 4.0
# Seconds that a forward pass of these many samples takes.
Seconds = Callable[[int], float]
# The seconds of a rank, from its number, that of the workers and the time of a sample at speed 1.
Case = Callable[[int, int, float], Seconds]


@dataclass(frozen=True)
class Run:
    """Training by workers as a case has them, with shares by speed or equal ones."""

    by_speed: bool
    case: Case


class _BackwardEnd(torch.autograd.Function):
    """The identity, which calls a function when the backward pass arrives."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, end: Callable[[], None]) -> Tensor:
        ctx.end = end
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.end()
        return gradient, None


class SleepingNet(nn.Module):
    """A network with the parameters of another one, which trains in a given time."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(p.detach().clone()) for p in parameters])
        self.seconds: Seconds = lambda _: 0.0
        self.computed_s = 0.0

    def forward(self, x: Tensor) -> Tensor:
        seconds = self.seconds(len(x))
        end_s = monotonic_s() + seconds
        # autograd computes the gradient of what came first last.
        first = _BackwardEnd.apply(
            self.weights[0], lambda: time.sleep(max(0.0, end_s - monotonic_s()))
        )
        total = torch.stack([weight.sum() for weight in (first, *self.weights[1:])]).sum()
        self.computed_s += seconds
        output: Tensor = x.flatten(1)[:, :10] + 1e-6 * total
        return output


def sleeping_net(num_classes: int, sample_shape: tuple[int, ...]) -> nn.Module:
    """Build a `SleepingNet` with the parameters of ResNet-8 of width 64."""
    job = Job.model_validate(_job(1, 1) | {"model": {"name": "resnet8", "args": {"width": 64}}})
    like = build_model(job.model, num_classes=num_classes, sample_shape=(3, 32, 32), seed=0)
    return SleepingNet(list(like.parameters()))


def slow_last(rank: int, workers: int, per_sample_s: float) -> Seconds:
    """Return the seconds of a rank when the last one is slower."""
    factor = SLOWER if rank == workers - 1 else 1.0
    return lambda samples: samples * per_sample_s * factor


def even(rank: int, workers: int, per_sample_s: float) -> Seconds:
    """Return the seconds of equal workers."""
    return lambda samples: samples * per_sample_s


def jitter(rank: int, workers: int, per_sample_s: float) -> Seconds:
    """Return seconds that are 1 to 4 times longer: log-normal, median 2, anew each time."""
    random = Random(rank)

    def seconds(samples: int) -> float:
        factor = 0.0
        while not 1 <= factor <= 4:
            factor = random.lognormvariate(0.693, 0.35)
        return samples * per_sample_s * factor

    return seconds


CASES: dict[str, Case] = {"slow": slow_last, "even": even, "jitter": jitter}


def measure(
    runs: Sequence[Run],
    workers: int,
    steps: int,
    seconds: float,
    samples_per_worker: int = SAMPLES_PER_WORKER,
) -> list[dict[str, float]]:
    """Return samples per second, and the fraction of the time in which workers computed.

    The runs are one after the other, in the same processes.
    """
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(workers) as pool:
        arguments = (runs, workers, steps, seconds, samples_per_worker, folder)
        by_rank = pool.starmap(_rank, [(rank, *arguments) for rank in range(workers)], 1)
    results = []
    for ranks in zip(*by_rank, strict=True):
        duration_s = max(duration_s for duration_s, _ in ranks)
        samples_per_s = steps * workers * samples_per_worker / duration_s
        busy = sum(computed_s for _, computed_s in ranks) / (workers * duration_s)
        results.append({"samples_per_s": round(samples_per_s, 1), "busy": round(busy, 3)})
    return results


def _job(workers: int, samples_per_worker: int, micro_batches: int = 1) -> dict[str, Any]:
    return {
        "model": sleeping_net,
        "data": "digits",
        "epochs": 1,
        "global_batch_size": workers * samples_per_worker,
        "workers": {"count": workers},
        "learning_rate": {"policy": "schedule", "shape": "constant", "initial": 0.01},
        "parallel": {"micro_batches": micro_batches * workers},
    }


def _rank(
    rank: int,
    runs: Sequence[Run],
    workers: int,
    steps: int,
    seconds: float,
    samples_per_worker: int,
    folder: str,
) -> list[tuple[float, float]]:
    torch.set_num_threads(1)
    rendezvous = (Path(folder) / "rendezvous").as_uri()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=workers)
    results = []
    for run in runs:
        job = Job.model_validate(
            _job(workers, samples_per_worker, MICRO_BATCHES if run.by_speed else 1)
        )
        learner = open_learner(job, DataParallel)
        net = cast(SleepingNet, learner.model)
        net.seconds = run.case(rank, workers, seconds / samples_per_worker)
        _train(learner, WARM_UP if run.by_speed else 1)
        dist.barrier()
        started_s, net.computed_s = monotonic_s(), 0.0
        _train(learner, steps)
        results.append((monotonic_s() - started_s, net.computed_s))
    dist.destroy_process_group()
    return results


def _train(learner: Learner, steps: int) -> None:
    """Train in phases of as many steps as an epoch of this small data set has."""
    micro_batches = MicroBatches.all(learner.config.micro_batches)
    in_epoch = learner.info.steps_per_epoch(learner.config.global_batch_size)
    for first in range(0, steps, in_epoch):
        learner.train(1, Steps(0, (0.01,) * min(steps - first, in_epoch)), micro_batches)
