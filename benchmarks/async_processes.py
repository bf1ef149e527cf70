"""Asynchronous training in real processes whose computing is a sleep.

So many real computations on 2 cores would measure the cores. Everything else is real: worker loop,
coordinator and shards on Ray; gradients and weights of ResNet-8 (width 64, 1.2 million parameters)
travel. The timer covers the loop of steps, not the start of processes and shards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import torch

from raytrain_opt import Job
from raytrain_opt.async_training.actors import ServerHandles, parameter_server
from raytrain_opt.async_training.scheduler import EpochPhase
from raytrain_opt.async_training.worker import RemoteServer
from raytrain_opt.async_training.worker_loop import AsyncTrainer
from raytrain_opt.clock import monotonic_s
from raytrain_opt.data.base import Batch, DataInfo
from raytrain_opt.models import build_model
from raytrain_opt.optim.factory import build_optimizer
from raytrain_opt.results import AsyncWorkerMetrics, Steps
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.state import TrainingState, to_cpu_state

MICRO_BATCH_SAMPLES = 32
INFO = DataInfo(10, (3, 32, 32), 10_000, 10_000, 0, 0)
# Returns the seconds of the next micro-batch.
Clock = Callable[[], float]


class Sleeper:
    """A learner whose micro-batches take the time of a clock."""

    def __init__(self, job: Job, clock: Clock) -> None:
        self.config, self.clock = LearnerConfig.from_job(job), clock
        self.model = network(job)

    def begin_micro_batches(self, epoch: int, count: int, held_out: int) -> None: ...

    def micro_batches_at(self, places: Iterator[tuple[int, int]]) -> Iterator[Batch]:
        for _ in places:
            yield Batch(torch.empty(MICRO_BATCH_SAMPLES, 0), torch.zeros(MICRO_BATCH_SAMPLES))

    def add_gradient(self, batch: Batch, place: tuple[int, int]) -> float:
        time.sleep(self.clock())
        return 0.0


class SimulatedWorker:
    """A worker process with one thread, as a Ray actor."""

    def __init__(self, job: Job, index: int) -> None:
        torch.set_num_threads(1)
        self.job, self.index = job, index

    def asynchronous(
        self, handles: ServerHandles, phase: EpochPhase, clock: Clock
    ) -> AsyncWorkerMetrics:
        learner: Any = Sleeper(self.job, clock)
        trainer = AsyncTrainer(learner, len(handles.shards))
        server = RemoteServer(handles, phase.id, self.index, trainer.dtype)
        return trainer.train(phase, server, lambda *_: None)


def job_of(workers: int) -> Job:
    """Return the job whose network and micro-batches the workers have."""
    return Job.model_validate(
        {
            "model": {"name": "resnet8", "args": {"width": 64}},
            "data": "digits",
            "epochs": 1,
            "global_batch_size": workers * MICRO_BATCH_SAMPLES,
            "workers": {"count": workers},
            "parallel": {"mode": "async"},
        }
    )


def network(job: Job) -> torch.nn.Module:
    """Return the network whose weights and gradients travel."""
    return build_model(
        job.model, num_classes=INFO.num_classes, sample_shape=INFO.sample_shape, seed=0
    ).to(memory_format=torch.channels_last)


@contextmanager
def worker_processes(job: Job, shards: int) -> Iterator[tuple[list[Any], ServerHandles, Any]]:
    """Start the job's worker processes and shards; yield their handles and the start state."""
    config = LearnerConfig.from_job(job)
    with parameter_server(config, INFO, job.max_restarts, shards) as handles:
        make: Any = ray.remote(SimulatedWorker).options(num_cpus=0)
        actors = [make.remote(job, index) for index in range(job.workers.size)]
        yield actors, handles, ray.put(start_state(job))


def start_state(job: Job) -> TrainingState:
    """Return the state before the first step."""
    model = network(job)
    optimizer = build_optimizer(job.optimizer, model, steps_per_epoch=1)
    return to_cpu_state(model.state_dict(), optimizer.state_dict(), {}, copy=True)


def asynchronous(
    workers: Sequence[Any], handles: ServerHandles, state: Any, steps: int, clocks: Sequence[Clock]
) -> float:
    """Return the seconds of an asynchronous phase; `clocks`: of each worker's micro-batches."""
    phase = EpochPhase(f"{monotonic_s()}", 1, Steps(0, (0.01,) * steps), len(workers), None)
    ray.get(handles.coordinator.begin.remote(phase))
    ray.get([shard.load.remote(phase, [state]) for shard in handles.shards])
    reports: list[AsyncWorkerMetrics] = ray.get(
        [
            worker.asynchronous.remote(handles, phase, clock)
            for worker, clock in zip(workers, clocks, strict=True)
        ]
    )
    ray.get(handles.coordinator.result.remote())
    return max(report.timings_s["compute_s"] for report in reports)
