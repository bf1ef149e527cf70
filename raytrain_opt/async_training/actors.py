"""The parameter server as Ray actors: one coordinator, and shards that hold the weights.

The pure parts are `scheduler` and `weight_shard`; this is who talks to whom. Workers claim
micro-batches from the coordinator, pull weights from all shards, push gradients to all shards and
report to the coordinator, which names the gradients of each update to the shards. Coordinator and
shards know the phase that a message is about, and ignore messages of another one.

Importing this imports no torch: only the shards' processes load it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from raytrain_opt.async_training.scheduler import (
    EpochPhase,
    MicroBatchDone,
    SspScheduler,
    Staleness,
    Update,
)
from raytrain_opt.clock import monotonic_s
from raytrain_opt.cluster.connection import alive_nodes, on_driver_node
from raytrain_opt.data.base import DataInfo
from raytrain_opt.errors import PoolError
from raytrain_opt.results import TrainTotals
from raytrain_opt.train.learner_config import LearnerConfig

if TYPE_CHECKING:
    from raytrain_opt.async_training.weight_shard import WeightShard
    from raytrain_opt.train.state import TrainingState

# How often the coordinator looks for silent workers; a fraction of the shortest limit of silence.
_WATCH_INTERVAL_S = 2.0
# Below this size Ray sends a value with the answer, which saves a message (Ray's own limit).
_INLINE_BYTES = 100 * 1024
# Workers wait in calls to these actors, several at a time each: far fewer than this.
_MAX_CONCURRENCY = 10_000

# The fields of each tensor of a state by name, and its plain values.
Snapshot = tuple[dict[str, tuple[Any, ...]], dict[str, Any]]


class SspCoordinator:
    """The scheduler as an actor. All methods are asynchronous, and none blocks another.

    Ray repeats a call whose connection was cut: each has the same effect twice as once.
    """

    def __init__(self) -> None:
        self._scheduler: SspScheduler | None = None
        self._shards: list[Any] = []
        self._start: list[Any] = []
        self._snapshots: dict[int, tuple[int, Snapshot]] = {}
        self._claims: dict[int, tuple[int, int | None]] = {}  # worker -> its last request, answer
        self._changed = asyncio.Condition()
        self._waiting: list[int] = []
        self._error: str | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._outbox: asyncio.Queue[Update] = asyncio.Queue()

    async def begin(self, phase: EpochPhase, shards: list[Any], boxed_state: list[Any]) -> None:
        """Begin a phase from this state, which the shards load."""
        for task in self._tasks:
            task.cancel()
        self._scheduler, self._shards = SspScheduler(phase), shards
        self._start, self._snapshots, self._claims = boxed_state, {}, {}
        self._waiting, self._error = [], None
        self._outbox = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._send()), asyncio.create_task(self._watch())]

    async def claim(self, phase: str, worker: int, request: int) -> int | None:
        """Return the next micro-batch for this worker; None when all are claimed.

        `request`: number of the worker's request.
        """
        scheduler = self._of(phase)
        if scheduler is None:
            return None
        if self._claims.get(worker, (0, None))[0] != request:
            self._claims[worker] = (request, scheduler.claim(worker, monotonic_s()))
        return self._claims[worker][1]

    async def begin_micro_batch(
        self, phase: str, worker: int, number: int, version: int
    ) -> int | None:
        """Wait until the micro-batch may begin.

        Returns None if it may begin on weights of this version, else the version that it needs.
        What has been given to another worker may begin at once: it counts for nothing.
        """
        scheduler = self._of(phase)
        if scheduler is None or scheduler.has_begun(worker, number):
            return None
        await self._wait(
            worker, lambda: not scheduler.owns(worker, number) or scheduler.may_begin(number)
        )
        if not scheduler.owns(worker, number):
            return None
        if not scheduler.new_enough(version):
            return scheduler.version
        scheduler.begin(worker, number, version, monotonic_s())
        return None

    async def done(self, phase: str, worker: int, result: MicroBatchDone) -> None:
        """Record a micro-batch whose gradient all shards have."""
        scheduler = self._of(phase)
        if scheduler is not None:
            await self._dispatch(scheduler.done(worker, result, monotonic_s()))

    async def wait_for_work(self, phase: str, worker: int) -> bool:
        """Wait; return True when there is something to claim again, False when all is done."""
        scheduler = self._of(phase)
        if scheduler is None:
            return False
        await self._wait(worker, lambda: scheduler.has_work or scheduler.finished)
        return not scheduler.finished

    async def leave(self, worker: int) -> None:
        """Free what a worker had claimed: it died, or was restarted."""
        self._claims.pop(worker, None)
        if self._scheduler is not None:
            await self._dispatch(self._scheduler.leave(worker))

    async def result(self) -> tuple[bool, TrainTotals, Staleness]:
        """Return whether the phase is finished, its sums, and the staleness of its gradients."""
        assert self._scheduler is not None
        return self._scheduler.finished, self._scheduler.totals, self._scheduler.staleness

    async def keep(self, phase: str, shard: int, version: int, snapshot: Snapshot) -> None:
        """Keep a shard's snapshot at this version, unless there is a newer one."""
        known_version, _ = self._snapshots.get(shard, (0, None))
        if self._of(phase) is not None and version > known_version:
            self._snapshots[shard] = (version, snapshot)

    async def recover(
        self, shard: int
    ) -> tuple[EpochPhase, int, tuple[int, Snapshot] | None, list[Any]] | None:
        """Return what a restarted shard needs; None before the first phase.

        The phase, its version now, the shard's last snapshot, and the state at the start.
        """
        if self._scheduler is None:
            return None
        scheduler = self._scheduler
        return scheduler.phase, scheduler.version, self._snapshots.get(shard), self._start

    def _of(self, phase: str) -> SspScheduler | None:
        scheduler = self._scheduler
        return scheduler if scheduler is not None and scheduler.phase.id == phase else None

    async def _dispatch(self, updates: list[Update]) -> None:
        for update in updates:
            self._outbox.put_nowait(update)
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, worker: int, ready: Callable[[], bool]) -> None:
        """Wait on behalf of a worker. Raises PoolError when a shard is lost for good."""
        self._waiting.append(worker)
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: ready() or self._error is not None)
        finally:
            self._waiting.remove(worker)
            if self._scheduler is not None:
                self._scheduler.heard(worker, monotonic_s())
        if self._error is not None:
            raise PoolError(self._error)

    async def _send(self) -> None:
        """Send updates to all shards, one after the other."""
        while True:
            update = await self._outbox.get()
            try:
                await asyncio.gather(*[shard.apply.remote(update) for shard in self._shards])
            except ray.exceptions.RayError as error:
                self._error = (
                    "a shard of the weights is lost: it died more often than max_restarts "
                    f"allows, or could not be restarted: {error}"
                )
                async with self._changed:
                    self._changed.notify_all()
                return

    async def _watch(self) -> None:
        """Give what silent workers have to others."""
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            assert self._scheduler is not None
            for worker in self._scheduler.silent(monotonic_s(), self._waiting):
                await self.leave(worker)


class WeightShardActor:
    """One shard as an actor. It is built when it is first needed.

    A restarted one continues from its last snapshot, or from the start of the phase.
    """

    def __init__(
        self, config: LearnerConfig, info: DataInfo, index: int, count: int, coordinator: str
    ) -> None:
        """Prepare nothing yet.

        `coordinator`: its name. (Ray warns that a handle would be lost with its creator.)
        """
        self._config, self._info, self._index, self._count = config, info, index, count
        self._coordinator: Any = ray.get_actor(coordinator)
        self._shard: WeightShard | None = None
        self._phase = ""
        self._published: tuple[int, Any] | None = None
        self._lost_updates = 0
        self._building = asyncio.Lock()
        self._changed = asyncio.Condition()

    async def prepare(self) -> None:
        """Build the shard, which takes seconds, before it is needed."""
        await self._build_once()

    async def load(self, phase: EpochPhase, boxed_state: list[Any]) -> None:
        """Begin a phase at this state."""
        shard, state = await self._build_once(), await boxed_state[0]
        shard.load(state, phase.weight_decay_factor)
        self._phase, self._published, self._lost_updates = phase.id, None, 0

    async def add(self, phase: str, number: int, gradient: Any) -> None:
        """Collect the gradient of a micro-batch."""
        shard = await self._build_once()
        if phase == self._phase:
            from raytrain_opt.async_training.weight_shard import from_wire, wire_dtype

            dtype = wire_dtype(self._config.parallel.compression, shard.dtype)
            shard.add(number, from_wire(gradient, dtype))

    async def apply(self, update: Update) -> None:
        """Apply an update, and send a snapshot if one is due."""
        shard = await self._build_once()
        if update.phase != self._phase:
            return
        shard.apply(update)
        if shard.version % self._config.parallel.snapshot_every == 0:
            self._coordinator.keep.remote(
                self._phase, self._index, shard.version, _pack(shard.state())
            )
        async with self._changed:
            self._changed.notify_all()

    async def pull(self, at_least: int) -> tuple[int, Any]:
        """Return version and flat weights, once they have this version.

        Large weights come as a reference in a list, the same for all who ask, so that each node
        fetches them once.
        """
        shard = await self._at_version(at_least)
        if self._published is None or self._published[0] != shard.version:
            self._published = (shard.version, _publish(shard))
        return self._published

    async def collect(self, version: int) -> tuple[TrainingState, int, int]:
        """Return its part of the state at this version, lost gradients and lost updates."""
        shard = await self._at_version(version)
        return shard.state(), shard.lost, self._lost_updates

    async def _at_version(self, version: int) -> WeightShard:
        shard = await self._build_once()
        async with self._changed:
            await self._changed.wait_for(lambda: shard.version >= version)
        return shard

    async def _build_once(self) -> WeightShard:
        async with self._building:
            if self._shard is None:
                shard = _build(self._config, self._info, self._index, self._count)
                await self._recover(shard)
                self._shard = shard
        return self._shard

    async def _recover(self, shard: WeightShard) -> None:
        answer = await self._coordinator.recover.remote(self._index)
        if answer is None:
            return
        phase, version, snapshot, boxed_state = answer
        kept, state = (0, await boxed_state[0]) if snapshot is None else _unpack(*snapshot)
        # Old weights at the current version: the updates in between are lost for this shard.
        shard.load(state, phase.weight_decay_factor, version)
        self._phase, self._lost_updates = phase.id, version - kept


def _pack(state: TrainingState) -> Snapshot:
    """Return arrays and plain values only, which the coordinator can hold without torch."""
    fields = {n: (t.data, t.shape, t.dtype, t.order) for n, t in state.tensors.items()}
    return fields, state.plain


def _unpack(version: int, snapshot: Snapshot) -> tuple[int, TrainingState]:
    from raytrain_opt.train.state import PackedTensor, TrainingState

    fields, plain = snapshot
    tensors = {n: PackedTensor(*values) for n, values in fields.items()}
    return version, TrainingState(tensors, plain)


def _publish(shard: WeightShard) -> Any:
    from raytrain_opt.async_training.weight_shard import to_wire

    wire = to_wire(shard.weights.buffer, shard.dtype)
    return wire if wire.nbytes < _INLINE_BYTES else [ray.put(wire)]


def _build(config: LearnerConfig, info: DataInfo, index: int, count: int) -> WeightShard:
    import torch

    from raytrain_opt.async_training.weight_shard import WeightShard
    from raytrain_opt.models import build_model
    from raytrain_opt.train.data_parallel import use_threads

    use_threads(1)
    model = build_model(
        config.model,
        num_classes=info.num_classes,
        sample_shape=info.sample_shape,
        seed=config.seed,
    )
    if config.channels_last and len(info.sample_shape) == 3:
        model = model.to(memory_format=torch.channels_last)
    steps = info.steps_per_epoch(config.global_batch_size)
    return WeightShard(config.optimizers[0], model, index, count, steps)


@dataclass(frozen=True)
class ServerHandles:
    """Handles of the actors, for the driver and the workers."""

    coordinator: Any
    shards: list[Any]


@contextmanager
def parameter_server(
    config: LearnerConfig, info: DataInfo, max_restarts: int
) -> Iterator[ServerHandles | None]:
    """Start coordinator and shards, spread over the nodes; end them with the block.

    Yields None for synchronous training, which needs no parameter server.
    """
    if config.parallel.mode != "async":
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
        max_concurrency=_MAX_CONCURRENCY,
        max_restarts=max_restarts,
        # Calls to a shard that died are repeated with the one in its place.
        max_task_retries=-1,
        scheduling_strategy="SPREAD",
    )
    count = config.parallel.shards or len(alive_nodes())
    shards: list[Any] = [shard_actor.remote(config, info, i, count, name) for i in range(count)]
    for shard in shards:
        shard.prepare.remote()
    try:
        yield ServerHandles(coordinator, shards)
    finally:
        for actor in (coordinator, *shards):
            ray.kill(actor)
