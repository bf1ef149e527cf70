"""The parameter server as Ray actors, and the program of the workers. Imports no torch.

Workers claim micro-batches from the coordinator, pull weights from all shards, push gradients to
all shards and report to the coordinator. Each message says which phase it is about. The actor in
the place of a shard that died knows no phase: it answers None, then the phase is aborted, and the
driver repeats it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import ray

from raytrain_opt.async_training.scheduler import EpochPhase, MicroBatchDone, SspScheduler
from raytrain_opt.cluster.connection import alive_nodes, on_driver_node
from raytrain_opt.data.base import DataInfo
from raytrain_opt.pools.mailbox import Signal
from raytrain_opt.pools.programs import ResidentConfig, SynchronousProgram
from raytrain_opt.results import TrainTotals
from raytrain_opt.threads import compute_threads
from raytrain_opt.train.learner_config import LearnerConfig

if TYPE_CHECKING:
    from ray.train import TrainContext

    from raytrain_opt.pools.resident import Group, Handler
    from raytrain_opt.train.state import TrainingState

# Workers wait in calls to the coordinator, several at a time each: far fewer than this.
_MAX_CONCURRENCY = 10_000


class SspCoordinator:
    """The scheduler as an actor. Ray may repeat a call: each has the same effect twice as once."""

    def __init__(self) -> None:
        self._scheduler: SspScheduler | None = None
        self._claims: dict[int, tuple[int, int | None]] = {}  # worker -> its last request, answer
        self._changed = Signal()

    async def begin(self, phase: EpochPhase) -> None:
        self._scheduler, self._claims = SspScheduler(phase), {}

    async def abort(self, phase: str) -> None:
        """End a phase whose weights are lost: nobody gets work, and nobody waits any more."""
        if self._of(phase) is not None:
            self._scheduler = None
            self._changed.notify()

    async def claim(self, phase: str, worker: int, request: int) -> int | None:
        """Return the next micro-batch, or None, for this number of the worker's requests."""
        if (scheduler := self._of(phase)) is None:
            return None
        if self._claims.get(worker, (0, None))[0] != request:
            self._claims[worker] = (request, scheduler.claim(worker))
        return self._claims[worker][1]

    async def begin_micro_batch(self, phase: str, worker: int, number: int, version: int) -> bool:
        """Wait until it may begin, or is another's; return False if it needs newer weights."""
        if (scheduler := self._of(phase)) is None or scheduler.has_begun(worker, number):
            return True

        def is_lost() -> bool:
            return not scheduler.owns(worker, number) or scheduler is not self._scheduler

        await self._changed.wait_for(lambda: scheduler.may_begin() or is_lost())
        if is_lost():
            return True
        if not scheduler.may_begin(version):
            return False
        scheduler.begin(number, version)
        return True

    async def done(self, phase: str, worker: int, result: MicroBatchDone) -> None:
        """Record a micro-batch whose gradient all shards have applied."""
        if (scheduler := self._of(phase)) is not None:
            scheduler.done(worker, result)
            self._changed.notify()

    async def wait_for_work(self, phase: str, worker: int) -> bool:
        """Wait; return True when there is something to claim again, False when all is done."""
        if (scheduler := self._of(phase)) is None:
            return False
        await self._changed.wait_for(
            lambda: scheduler.has_work or scheduler.finished or scheduler is not self._scheduler
        )
        return scheduler is self._scheduler and not scheduler.finished

    async def leave(self, worker: int) -> None:
        """Free what a lost worker had claimed."""
        self._claims.pop(worker, None)
        if self._scheduler is not None:
            self._scheduler.leave(worker)
            self._changed.notify()

    async def end_early(self, phase: str) -> None:
        """Let this phase end with the step that has begun."""
        if (scheduler := self._of(phase)) is not None:
            scheduler.end_early()
            self._changed.notify()

    async def result(self) -> tuple[bool, TrainTotals, Counter[int]] | None:
        """Return whether the phase is finished, its sums and the staleness; None if aborted."""
        if (scheduler := self._scheduler) is None:
            return None
        steps = scheduler.end // scheduler.phase.micro_batches
        return scheduler.finished, replace(scheduler.totals, steps=steps), scheduler.staleness

    def _of(self, phase: str) -> SspScheduler | None:
        scheduler = self._scheduler
        return scheduler if scheduler is not None and scheduler.phase.id == phase else None


class WeightShardActor:
    """One shard as an actor. It answers None about a phase that it did not begin."""

    def __init__(self, config: LearnerConfig, info: DataInfo, index: int, count: int) -> None:
        import torch

        from raytrain_opt.async_training.weight_shard import WeightShard

        torch.set_num_threads(1)
        model = config.build_model(info)
        updates = info.steps_per_epoch(config.global_batch_size) * config.worker_count
        self._shard = WeightShard(config.optimizers[0], model, index, count, updates)
        self._config, self._phase = config, ""
        self._published: tuple[int, list[Any]] | None = None

    def load(self, phase: EpochPhase, boxed_state: list[Any]) -> None:
        self._shard.load(ray.get(boxed_state[0]), phase)
        self._phase, self._published = phase.id, None

    def apply(self, phase: str, number: int, version: int, gradient: Any) -> int | None:
        """Apply a micro-batch's gradient; return its staleness."""
        if phase != self._phase:
            return None
        from raytrain_opt.async_training.weight_shard import from_wire, wire_dtype

        dtype = wire_dtype(self._config.parallel.compression, self._shard.dtype)
        return self._shard.apply(number, version, from_wire(gradient, dtype))

    def pull(self, phase: str) -> tuple[int, list[Any]] | None:
        """Return version and flat weights, as a boxed reference that a node fetches once."""
        if phase != self._phase:
            return None
        shard = self._shard
        if self._published is None or self._published[0] != shard.version:
            from raytrain_opt.async_training.weight_shard import to_wire

            wire = to_wire(shard.weights_ahead(), shard.dtype)
            self._published = (shard.version, [ray.put(wire)])
        return self._published

    def collect(self, phase: str) -> TrainingState | None:
        return self._shard.state() if phase == self._phase else None


@dataclass(frozen=True)
class ServerHandles:
    """Handles of the actors, for the driver and the workers."""

    coordinator: Any
    shards: list[Any]


@contextmanager
def parameter_server(
    config: LearnerConfig, info: DataInfo, max_restarts: int, shards: int | None = None
) -> Iterator[ServerHandles]:
    """Start coordinator and `shards`, by default one on each node; end them afterwards."""
    coordinator: Any = (
        ray.remote(SspCoordinator)
        .options(
            num_cpus=0,
            max_concurrency=_MAX_CONCURRENCY,
            max_task_retries=-1,
            label_selector=on_driver_node(),
        )
        .remote()
    )
    shard_actor = ray.remote(WeightShardActor).options(
        num_cpus=0,
        max_restarts=max_restarts,
        # Calls to a shard that died are repeated with the one in its place.
        max_task_retries=-1,
        scheduling_strategy="SPREAD",
    )
    count = shards or len(alive_nodes())
    actors: list[Any] = [shard_actor.remote(config, info, i, count) for i in range(count)]
    try:
        yield ServerHandles(coordinator, actors)
    finally:
        for actor in (coordinator, *actors):
            ray.kill(actor)


@dataclass(frozen=True)
class AsynchronousProgram(SynchronousProgram):
    """A program whose workers train against a parameter server."""

    server: ServerHandles
    forms_group: ClassVar[bool] = False

    def trainer(self, config: ResidentConfig) -> Callable[..., Any]:
        """Import TorchTrainer, whose workers are not connected; it reports dead ones."""
        from ray.train.torch import TorchTrainer

        from raytrain_opt.async_training.worker import ReportLostWorker, UnconnectedTorchConfig

        def make(**arguments: Any) -> TorchTrainer:
            arguments["run_config"].callbacks = [ReportLostWorker(config.mailbox, self.server)]
            return TorchTrainer(torch_config=UnconnectedTorchConfig(), **arguments)

        return make

    def join_group(self, context: TrainContext) -> Group:
        """Return this worker alone: each one calls the mailbox itself."""
        from raytrain_opt.pools.resident import Group

        return Group()

    def make_handler(self, config: ResidentConfig, context: TrainContext, group: Group) -> Handler:
        """Build model and data."""
        import ray.train.torch
        import torch

        from raytrain_opt.async_training.worker import AsyncWorker
        from raytrain_opt.pools.state_store import ObjectStore
        from raytrain_opt.train.learner import Learner

        # Ray Train places each worker separately, so their number on this node is not known.
        workers_on_node = math.ceil(config.plan.workers / len(alive_nodes()))
        torch.set_num_threads(compute_threads(config.threads, workers_on_node))
        learner = Learner(*config.fetch_inputs(), ray.train.torch.get_device())
        return AsyncWorker(learner, context.get_world_rank(), self.server, ObjectStore())
