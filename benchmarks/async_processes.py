"""What a step of each way to train takes in real processes, with unequal workers.

Computing and links are **sleeps**, as an environment (async_environments.py) gives them, because
so many real computations on 2 cores would measure the cores. Everything else is real; gradients
and weights of ResNet-8 (width 64, 1.2 million parameters) travel.

sync, without slow, balanced   the product's learner, DDP over gloo (balanced_training.py)
backup    an actor adds the gradients of a step as they arrive. The last one of P is lost, and its
          worker, whose sleep ends at once, begins the next step with the others
async     the product's worker loop, coordinator and shards on Ray, with one micro-batch per worker
          and step, and with four

On the slow network each exchange of gradients takes the time of a ring more, and with async each
worker's link carries weights and gradient of every micro-batch. The timer covers the loop of
steps, not the start of processes, connections and shards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import ray
import torch

from benchmarks.async_environments import ENVIRONMENTS, Environment, steps_s
from benchmarks.async_simulation import Costs, Network, Simulation
from benchmarks.balanced_training import Run, Seconds, measure
from raytrain_opt import Job
from raytrain_opt.async_training.actors import ServerHandles, parameter_server
from raytrain_opt.async_training.scheduler import EpochPhase, MicroBatchDone
from raytrain_opt.async_training.weight_shard import Weights, WireArray
from raytrain_opt.async_training.worker import RemoteServer
from raytrain_opt.async_training.worker_loop import AsyncTrainer
from raytrain_opt.clock import monotonic_s
from raytrain_opt.data.base import Batch, DataInfo
from raytrain_opt.models import build_model
from raytrain_opt.optim.factory import build_optimizer
from raytrain_opt.results import AsyncWorkerMetrics, BufferUpdates
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.state import TrainingState, to_cpu_state

MICRO_BATCH_SAMPLES, SAMPLES_PER_WORKER = 32, 48
INFO = DataInfo(10, (3, 32, 32), 10_000, 10_000, 0, 0)
ASYNC = {"async": 1, "async, 4 micro-batches": 4}
WAYS = ("sync", "without slow", "backup", "balanced", *ASYNC)
# Returns the seconds of the next micro-batch.
Clock = Callable[[], float]


class Sleeper:
    """A learner whose micro-batches take the time of a clock."""

    def __init__(self, job: Job, clock: Clock) -> None:
        self.config, self.clock = LearnerConfig.from_job(job), clock
        self.model = network(job)

    def begin_micro_batches(self, epoch: int, count: int) -> None: ...

    def micro_batches_at(self, places: Iterator[tuple[int, int]]) -> Iterator[Batch]:
        for _ in places:
            yield Batch(torch.empty(MICRO_BATCH_SAMPLES, 0), torch.zeros(MICRO_BATCH_SAMPLES))

    def add_gradient(self, batch: Batch, place: tuple[int, int]) -> float:
        time.sleep(self.clock())
        return 0.0

    def buffers(self, batches: int) -> BufferUpdates:
        return BufferUpdates(batches, {}, {})


class SlowLink(RemoteServer):
    """The parameter server over a link that carries weights or a gradient in `message_s`."""

    message_s = 0.0

    def pull(self) -> Weights:
        time.sleep(self.message_s)
        return super().pull()

    def push(self, number: int, version: int, gradients: Sequence[WireArray]) -> int:
        time.sleep(self.message_s)
        return super().push(number, version, gradients)


class SimulatedWorker:
    """A worker process with one thread, as a Ray actor."""

    def __init__(self, job: Job, index: int) -> None:
        torch.set_num_threads(1)
        self.job, self.index = job, index

    def asynchronous(
        self, handles: ServerHandles, phase: EpochPhase, clock: Clock, message_s: float
    ) -> AsyncWorkerMetrics:
        learner: Any = Sleeper(self.job, clock)
        trainer = AsyncTrainer(learner, len(handles.shards))
        server = SlowLink(handles, phase.id, self.index, trainer.dtype)
        server.message_s = message_s
        return trainer.train(phase, server, lambda *_: None)

    def with_backup(self, sums: Any, steps: int, clock: Clock, exchange_s: float) -> float:
        """Return the seconds of `steps` steps with the other workers."""
        gradient = torch.cat([p.detach().flatten() for p in network(self.job).parameters()])
        ray.get(sums.joined.remote())
        started_s = monotonic_s()
        for step in range(steps):
            ended = sums.ended.remote(step)
            done, _ = ray.wait([ended], timeout=clock())
            if not done:
                ended = sums.add.remote(step, gradient.numpy())
            ray.get(ended)
            time.sleep(exchange_s)
        return monotonic_s() - started_s


class FastestGradients:
    """The sums of the fastest `needed` gradients of each step, as a Ray actor."""

    def __init__(self, workers: int, needed: int) -> None:
        self._workers, self._needed, self._joined = workers, needed, 0
        self._step, self._count = 0, 0
        self._sum = self._last = torch.zeros(())
        self._changed = asyncio.Condition()

    async def joined(self) -> None:
        """Wait for all workers."""
        async with self._changed:
            self._joined += 1
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._joined == self._workers)

    async def ended(self, step: int) -> Any:
        """Return the mean gradient of a step when it has one."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._step > step)
        return self._last.numpy()

    async def add(self, step: int, gradient: Any) -> Any:
        """Add a gradient, unless the step has ended without it; return the step's mean."""
        async with self._changed:
            if step == self._step:
                self._sum, self._count = self._sum + torch.tensor(gradient), self._count + 1
            if self._count == self._needed:
                self._last = self._sum / self._count
                self._sum, self._count, self._step = torch.zeros(()), 0, self._step + 1
                self._changed.notify_all()
        return await self.ended(step)


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
        assert handles is not None
        make: Any = ray.remote(SimulatedWorker).options(num_cpus=0)
        actors = [make.remote(job, index) for index in range(job.workers.size)]
        yield actors, handles, ray.put(start_state(job))


def start_state(job: Job) -> TrainingState:
    """Return the state before the first step."""
    model = network(job)
    optimizer = build_optimizer(job.optimizer, model, steps_per_epoch=1)
    return to_cpu_state(model.state_dict(), optimizer.state_dict(), {}, copy=True)


def asynchronous(
    workers: Sequence[Any],
    handles: ServerHandles,
    state: Any,
    steps: int,
    clocks: Sequence[Clock],
    split: int = 1,
    message_s: float = 0.0,
) -> tuple[float, float]:
    """Return the seconds of an asynchronous phase, and the mean staleness.

    `clocks`: of each worker's micro-batches, `split` per worker and step.
    """
    micro_batches = split * len(workers)
    phase = EpochPhase(f"{monotonic_s()}", 1, 0, (0.01,) * steps, micro_batches, None)
    ray.get(handles.coordinator.begin.remote(phase, handles.shards, [state]))
    ray.get([shard.load.remote(phase, [state]) for shard in handles.shards])
    reports: list[AsyncWorkerMetrics] = ray.get(
        [
            worker.asynchronous.remote(handles, phase, clock, message_s)
            for worker, clock in zip(workers, clocks, strict=True)
        ]
    )
    _, _, staleness = ray.get(handles.coordinator.result.remote())
    return max(report.duration_s for report in reports), staleness.mean


def clock_of(environment: Environment, worker: int, unit_s: float) -> Clock:
    """Return the clock of a worker whose usual share of a step takes `unit_s`."""
    seconds = environment.clock(worker)
    return lambda: unit_s * seconds(worker)


def seconds_of(environment: Environment, rank: int, workers: int, per_sample_s: float) -> Seconds:
    """Return the seconds of a rank of balanced_training.py in this environment."""
    seconds = environment.clock(rank)
    return lambda samples: samples * per_sample_s * seconds(rank)


def measure_steps_s(
    environments: Sequence[Environment], steps: int, unit_s: float, running: tuple[Any, Any, Any]
) -> dict[str, dict[str, float]]:
    """Return the seconds of a step by environment and way; `running`: `worker_processes`."""
    workers, handles, state = running
    measured: dict[str, dict[str, float]] = {place.name: {} for place in environments}
    for place in environments:
        clocks = [clock_of(place, worker, unit_s) for worker in range(place.workers)]
        for way, split in ASYNC.items():
            finer = [partial(_divided, clock, split) for clock in clocks]
            message_s = place.message_s * unit_s
            seconds, _ = asynchronous(workers, handles, state, steps, finer, split, message_s)
            measured[place.name][way] = seconds / steps
        seconds = with_backup(workers, steps, clocks, unit_s * place.all_reduce_s(place.workers))
        measured[place.name]["backup"] = seconds / steps
    for way in ("sync", "without slow", "balanced"):
        places = environments
        if way == "without slow":
            places = [replace(place, workers=place.workers - 1, slower=1.0) for place in places]
        mode, count = "balanced" if way == "balanced" else "sync", places[0].workers
        runs = [
            Run(mode, partial(seconds_of, place), unit_s * place.all_reduce_s(count))
            for place in places
        ]
        share_s = unit_s * environments[0].workers / count
        results = measure(runs, count, steps, share_s, SAMPLES_PER_WORKER)
        for place, result in zip(environments, results, strict=True):
            step_s = count * SAMPLES_PER_WORKER / result["samples_per_s"]
            measured[place.name][way] = step_s
    return measured


def with_backup(
    workers: Sequence[Any], steps: int, clocks: Sequence[Clock], exchange_s: float
) -> float:
    """Return the seconds of so many steps of which each ends without its last gradient."""
    make: Any = ray.remote(FastestGradients).options(num_cpus=0, max_concurrency=1000)
    sums = make.remote(len(workers), len(workers) - 1)
    refs = [
        worker.with_backup.remote(sums, steps, clock, exchange_s)
        for worker, clock in zip(workers, clocks, strict=True)
    ]
    durations_s: list[float] = ray.get(refs)
    return max(durations_s)


def _divided(clock: Clock, split: int) -> float:
    return clock() / split


def simulated_steps_s(
    place: Environment, steps: int, unit_s: float, size: int, shards: int, costs: Costs
) -> dict[str, float]:
    """Return the simulated seconds of a step by way; software costs of async are included."""
    seconds = {
        way: unit_s * steps_s(way, place, 0, 400) / 400
        for way in ("sync", "without slow", "backup", "balanced")
    }
    links, bytes_per_s = 1, 1e12
    if place.message_s:  # only the workers' links are slow: a shard on the node of each
        links = shards = place.workers
        bytes_per_s = size / (place.message_s * unit_s)
    for way, split in ASYNC.items():
        link = Network(links, shards, size, size, bytes_per_s, costs)
        phase = EpochPhase("1.0", 1, 0, (0.1,) * steps, split * place.workers, None)
        clock = place.clock(0)

        def next_s(worker: int, clock: Any = clock, split: int = split) -> float:
            return float(unit_s * clock(worker) / split)

        run = Simulation(phase, place.workers, next_s, link, micro_batch_done)
        seconds[way] = run.run() / steps
    return seconds


def micro_batch_done(_worker: int, number: int) -> MicroBatchDone:
    """Return the sums of a micro-batch that nobody computed."""
    return MicroBatchDone(number, 0.0, 0, 0)


def environments_of(workers: int) -> list[Environment]:
    """Return every environment with so many workers."""
    return [make(workers) for make in ENVIRONMENTS.values()]
