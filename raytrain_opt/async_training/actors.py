"""The parameter server as Ray actors: one coordinator, and shards that hold the weights.

At the end the program of the workers, which the driver hands to Ray Train.

The pure parts are `scheduler` and `weight_shard`; this is who talks to whom. Workers claim
micro-batches from the coordinator, pull weights from all shards, push gradients to all shards,
which apply them at once, and report to the coordinator. Coordinator and shards know the phase that
a message is about, and ignore messages of another one.

Importing this imports no torch: only the shards' processes load it.
"""

from __future__ import annotations

import asyncio
import math
import pickle
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import ray

from raytrain_opt.async_training.scheduler import EpochPhase, MicroBatchDone, SspScheduler
from raytrain_opt.clock import monotonic_s
from raytrain_opt.cluster.connection import alive_nodes, on_driver_node
from raytrain_opt.data.base import DataInfo
from raytrain_opt.pools.mailbox import Signal
from raytrain_opt.recording.records import StalenessRecord
from raytrain_opt.results import TrainTotals
from raytrain_opt.threads import compute_threads
from raytrain_opt.train.learner_config import LearnerConfig

if TYPE_CHECKING:
    from ray.train import TrainContext

    from raytrain_opt.async_training.weight_shard import WeightShard
    from raytrain_opt.pools.programs import ResidentConfig
    from raytrain_opt.pools.resident import Group, Handler
    from raytrain_opt.train.state import TrainingState

# How often the coordinator looks for silent workers; a fraction of the shortest limit of silence.
_WATCH_INTERVAL_S = 2.0
# Below this size Ray sends a value with the answer, which saves a message (Ray's own limit).
_INLINE_BYTES = 100 * 1024
# Updates between copies of a shard to the coordinator: as many are lost when its process dies.
_SNAPSHOT_EVERY = 100
# Workers wait in calls to the coordinator, several at a time each: far fewer than this.
_MAX_CONCURRENCY = 10_000


@dataclass(frozen=True)
class Recovery:
    """What a restarted shard needs: phase, micro-batches, pickled snapshot, start state."""

    phase: EpochPhase
    done: set[int]
    dropped: set[int]
    snapshot: bytes | None
    boxed_state: list[Any]


class SspCoordinator:
    """The scheduler as an actor. Ray may repeat a call: each has the same effect twice as once."""

    def __init__(self) -> None:
        self._scheduler: SspScheduler | None = None
        self._shards: list[Any] = []
        self._start: list[Any] = []
        self._snapshots: dict[int, tuple[int, bytes]] = {}
        self._restarted: set[int] = set()  # shards, in this phase
        self._claims: dict[int, tuple[int, int | None]] = {}  # worker -> its last request, answer
        self._changed = Signal()
        self._waiting: list[int] = []
        self._watcher: asyncio.Task[None] | None = None

    async def begin(self, phase: EpochPhase, shards: list[Any], boxed_state: list[Any]) -> None:
        """Begin a phase from this state, which the shards load."""
        self._scheduler, self._shards = SspScheduler(phase), shards
        self._start, self._snapshots, self._claims = boxed_state, {}, {}
        self._restarted = set()
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())

    async def claim(self, phase: str, worker: int, request: int) -> int | None:
        """Return the next micro-batch, or None, for this number of the worker's requests."""
        scheduler = self._of(phase)
        if scheduler is None:
            return None
        if self._claims.get(worker, (0, None))[0] != request:
            self._claims[worker] = (request, scheduler.claim(worker, monotonic_s()))
        return self._claims[worker][1]

    async def begin_micro_batch(self, phase: str, worker: int, number: int, version: int) -> bool:
        """Wait until it may begin, or is another's; return False if it needs newer weights."""
        scheduler = self._of(phase)
        if scheduler is None or scheduler.has_begun(worker, number):
            return True
        await self._wait(
            worker, lambda: not scheduler.owns(worker, number) or scheduler.may_begin()
        )
        if not scheduler.owns(worker, number):
            return True
        if not scheduler.may_begin(version):
            return False
        scheduler.begin(worker, number, version, monotonic_s())
        return True

    async def done(self, phase: str, worker: int, result: MicroBatchDone) -> None:
        """Record a micro-batch whose gradient all shards have applied."""
        scheduler = self._of(phase)
        if scheduler is not None:
            version = scheduler.version
            scheduler.done(worker, result, monotonic_s())
            if scheduler.version > version:
                shards = [self._shards[shard] for shard in self._restarted]
                await asyncio.gather(*[s.catch_up.remote(phase, result.number) for s in shards])
            self._changed.notify()

    async def wait_for_work(self, phase: str, worker: int) -> bool:
        """Wait; return True when there is something to claim again, False when all is done."""
        scheduler = self._of(phase)
        if scheduler is None:
            return False
        await self._wait(worker, lambda: scheduler.has_work or scheduler.finished)
        return not scheduler.finished

    async def leave(self, worker: int) -> None:
        """Free what a lost worker had claimed; from now on the shards drop what it still sends."""
        self._claims.pop(worker, None)
        scheduler = self._scheduler
        if scheduler is not None:
            # First: a micro-batch that only some shards have dropped yet must not count as done.
            scheduler.leave(worker)
            phase, dropped = scheduler.phase.id, scheduler.dropped
            await asyncio.gather(*[shard.drop.remote(phase, dropped) for shard in self._shards])
            self._changed.notify()

    async def end_early(self, phase: str) -> None:
        """Let this phase end with the step that has begun."""
        scheduler = self._of(phase)
        if scheduler is not None:
            scheduler.end_early()
            self._changed.notify()

    async def result(self) -> tuple[bool, TrainTotals, StalenessRecord]:
        """Return whether the phase is finished, its sums, and the staleness of its gradients."""
        scheduler = self._scheduler
        assert scheduler is not None
        totals = replace(scheduler.totals, steps=scheduler.end // scheduler.phase.micro_batches)
        return scheduler.finished, totals, scheduler.staleness

    async def keep(self, phase: str, shard: int, version: int, snapshot: bytes) -> None:
        """Keep a shard's snapshot at this version, unless there is a newer one."""
        known_version, _ = self._snapshots.get(shard, (0, b""))
        if self._of(phase) is not None and version > known_version:
            self._snapshots[shard] = (version, snapshot)

    async def recover(self, shard: int) -> Recovery | None:
        """Return what a restarted shard needs; None before the first phase."""
        if self._scheduler is None:
            return None
        _, snapshot = self._snapshots.get(shard, (0, None))
        scheduler = self._scheduler
        self._restarted.add(shard)
        return Recovery(
            scheduler.phase, scheduler.done_numbers, scheduler.dropped, snapshot, self._start
        )

    def _of(self, phase: str) -> SspScheduler | None:
        scheduler = self._scheduler
        return scheduler if scheduler is not None and scheduler.phase.id == phase else None

    async def _wait(self, worker: int, ready: Callable[[], bool]) -> None:
        """Wait on behalf of a worker, which is not silent meanwhile."""
        self._waiting.append(worker)
        try:
            await self._changed.wait_for(ready)
        finally:
            self._waiting.remove(worker)
            if self._scheduler is not None:
                self._scheduler.heard(worker, monotonic_s())

    async def _watch(self) -> None:
        """Give what silent workers have to others."""
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            assert self._scheduler is not None
            for worker in self._scheduler.silent(monotonic_s(), self._waiting):
                await self.leave(worker)


class WeightShardActor:
    """One shard as an actor. A restarted one continues from its last snapshot in this phase."""

    def __init__(
        self, config: LearnerConfig, info: DataInfo, index: int, count: int, coordinator: str
    ) -> None:
        """Build the shard. `coordinator`: its name, as a handle would be lost with its creator."""
        self._config, self._index = config, index
        self._coordinator: Any = ray.get_actor(coordinator)
        self._shard = _build(config, info, index, count)
        self._phase = ""
        self._published: tuple[int, Any] | None = None
        self._lost_updates = 0
        recovery: Any = ray.get(self._coordinator.recover.remote(index))
        if recovery is not None:
            self._recover(recovery)

    def _recover(self, recovery: Recovery) -> None:
        if recovery.snapshot is None:
            state, applied = ray.get(recovery.boxed_state[0]), set[int]()
        else:
            state, applied = pickle.loads(recovery.snapshot)
        # Old weights at the current version: the updates in between are lost for this shard.
        self._shard.load(state, recovery.phase, applied | recovery.done, recovery.dropped)
        self._phase, self._lost_updates = recovery.phase.id, len(recovery.done - applied)

    def load(self, phase: EpochPhase, boxed_state: list[Any]) -> None:
        """Begin a phase at this state."""
        self._shard.load(ray.get(boxed_state[0]), phase)
        self._phase, self._published, self._lost_updates = phase.id, None, 0

    def apply(self, phase: str, number: int, version: int, gradient: Any) -> int:
        """Apply a micro-batch's gradient, send a snapshot if one is due; return the staleness."""
        if phase != self._phase:
            return 0
        from raytrain_opt.async_training.weight_shard import from_wire, wire_dtype

        shard = self._shard
        before, dtype = shard.version, wire_dtype(self._config.parallel.compression, shard.dtype)
        staleness = shard.apply(number, version, from_wire(gradient, dtype))
        if shard.version > before and shard.version % _SNAPSHOT_EVERY == 0:
            snapshot = pickle.dumps((shard.state(), shard.applied))
            self._coordinator.keep.remote(phase, self._index, shard.version, snapshot)
        return staleness

    def catch_up(self, phase: str, number: int) -> None:
        """Count a micro-batch that is done as lost if only the process that died applied it."""
        if phase == self._phase:
            before = self._shard.version
            self._shard.applied.add(number % self._shard.phase.size)
            self._lost_updates += self._shard.version - before

    def drop(self, phase: str, numbers: set[int]) -> None:
        """Ignore gradients of these micro-batches from now on."""
        if phase == self._phase:
            self._shard.drop(numbers)

    def pull(self) -> tuple[int, Any]:
        """Return version and flat weights; large ones as a boxed reference, once for each node."""
        shard = self._shard
        if self._published is None or self._published[0] != shard.version:
            from raytrain_opt.async_training.weight_shard import to_wire

            wire = to_wire(shard.weights_ahead(), shard.dtype)
            value = wire if wire.nbytes < _INLINE_BYTES else [ray.put(wire)]
            self._published = (shard.version, value)
        return self._published

    def collect(self) -> tuple[TrainingState, int]:
        """Return its part of the state, and the number of lost updates."""
        return self._shard.state(), self._lost_updates


def _build(config: LearnerConfig, info: DataInfo, index: int, count: int) -> WeightShard:
    import torch

    from raytrain_opt.async_training.weight_shard import WeightShard
    from raytrain_opt.models import build_model

    torch.set_num_threads(1)
    model = build_model(
        config.model,
        num_classes=info.num_classes,
        sample_shape=info.sample_shape,
        seed=config.seed,
        channels_last=config.channels_last,
    )
    updates = info.steps_per_epoch(config.global_batch_size) * config.worker_count
    return WeightShard(config.optimizers[0], model, index, count, updates)


@dataclass(frozen=True)
class ServerHandles:
    """Handles of the actors, for the driver and the workers."""

    coordinator: Any
    shards: list[Any]


@contextmanager
def parameter_server(
    config: LearnerConfig, info: DataInfo, max_restarts: int, shards: int | None = None
) -> Iterator[ServerHandles | None]:
    """Start coordinator and shards; yield None for synchronous training.

    `shards`: their number, by default one for each node.
    """
    if config.parallel.common_steps:
        yield None
        return
    name = f"ssp-coordinator-{secrets.token_hex(8)}"
    coordinator: Any = (
        ray.remote(SspCoordinator)
        .options(
            num_cpus=0,
            max_concurrency=_MAX_CONCURRENCY,
            max_task_retries=-1,
            label_selector=on_driver_node(),
            name=name,
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
    actors: list[Any] = [shard_actor.remote(config, info, i, count, name) for i in range(count)]
    try:
        yield ServerHandles(coordinator, actors)
    finally:
        for actor in (coordinator, *actors):
            ray.kill(actor)


@dataclass(frozen=True)
class AsynchronousWorkers:
    """Workers that train against a parameter server; implements `WorkerProgram`."""

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
        from raytrain_opt.pools.resident import Alone

        return Alone()

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
