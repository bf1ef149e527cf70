"""The parameter server as Ray actors: one clock, and shards that hold the weights.

The pure parts are `train.share_clock` and `train.parameter_server`; here is who talks to whom.
Workers claim shares of the clock, pull weights from all shards, push gradients to all shards and
tell the clock; the clock tells the shards which gradients make an update. Both know the phase that
a message is about, and pass over messages of another one.

Free of torch, like the clock's process: only shards load it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.schema import Job
from raytrain_opt.data.base import DataInfo
from raytrain_opt.errors import PoolError
from raytrain_opt.pools.session import alive_nodes
from raytrain_opt.train.share_clock import Done, Phase, ShareClock, Staleness, Update
from raytrain_opt.train.totals import TrainTotals

if TYPE_CHECKING:
    from raytrain_opt.train.parameter_server import Shard
    from raytrain_opt.train.state import HostState

# So often the clock looks for workers that say nothing.
_WATCH_S = 2.0
# Below this size Ray sends a value with the answer, which is one message less (its own limit).
_INLINE_BYTES = 100 * 1024

# The fields of each tensor of a state by name, and its plain values.
Snapshot = tuple[dict[str, tuple[Any, ...]], dict[str, Any]]


class Clock:
    """The books, as an actor. All methods are asynchronous and none blocks the others."""

    def __init__(self) -> None:
        self._books: ShareClock | None = None
        self._shards: list[Any] = []
        self._start: list[Any] = []
        self._snapshots: dict[int, tuple[int, Snapshot]] = {}
        self._changed = asyncio.Condition()
        self._waiting: list[int] = []
        self._error: str | None = None
        self._helpers: list[asyncio.Task[None]] = []
        self._outbox: asyncio.Queue[Update] = asyncio.Queue()

    async def begin(self, phase: Phase, shards: list[Any], boxed_state: list[Any]) -> None:
        """A phase from this state, which the shards have loaded."""
        for helper in self._helpers:
            helper.cancel()
        self._books, self._shards, self._start = ShareClock(phase), shards, boxed_state
        self._snapshots, self._waiting, self._error = {}, [], None
        self._outbox = asyncio.Queue()
        self._helpers = [asyncio.create_task(self._send()), asyncio.create_task(self._watch())]

    async def claim(self, phase: str, worker: int) -> int | None:
        """See `Server.claim`."""
        books = self._of(phase)
        return None if books is None else books.claim(worker, monotonic_s())

    async def begin_share(self, phase: str, worker: int, share: int, version: int) -> int | None:
        """See `Server.begin`. A share that has become another's counts for nothing."""
        books = self._of(phase)
        if books is None:
            return None
        at = books
        await self._wait(worker, lambda: not at.owns(worker, share) or at.may_begin(share))
        if not books.owns(worker, share):
            return None
        if not books.new_enough(version):
            return books.version
        books.begin(worker, share, version, monotonic_s())
        return None

    async def done(self, phase: str, worker: int, share: Done) -> None:
        """See `Server.done`."""
        books = self._of(phase)
        if books is not None:
            await self._make(books.done(worker, share, monotonic_s()))

    async def wait_for_work(self, phase: str, worker: int) -> bool:
        """See `Server.wait_for_work`."""
        books = self._of(phase)
        if books is None:
            return False
        at = books
        await self._wait(worker, lambda: at.has_work or at.finished)
        return not books.finished

    async def leave(self, worker: int) -> None:
        """This worker died, or comes new: what it had is for others."""
        if self._books is not None:
            await self._make(self._books.leave(worker))

    async def result(self) -> tuple[bool, TrainTotals, Staleness]:
        """Whether the phase is finished; its sums; the staleness of its gradients."""
        assert self._books is not None
        return self._books.finished, self._books.totals, self._books.staleness

    async def keep(self, phase: str, shard: int, version: int, snapshot: Snapshot) -> None:
        """A shard's snapshot after so many updates."""
        if self._of(phase) is not None:
            self._snapshots[shard] = (version, snapshot)

    async def recover(
        self, shard: int
    ) -> tuple[Phase, int, tuple[int, Snapshot] | None, list[Any]] | None:
        """For a shard that was started again: the phase, its version now, the last snapshot and
        the state at the start; None before the first phase.
        """
        if self._books is None:
            return None
        at = self._books
        return at.phase, at.version, self._snapshots.get(shard), self._start

    def _of(self, phase: str) -> ShareClock | None:
        return self._books if self._books is not None and self._books.phase.id == phase else None

    async def _make(self, updates: list[Update]) -> None:
        for update in updates:
            self._outbox.put_nowait(update)
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, worker: int, ready: Callable[[], bool]) -> None:
        """Raises PoolError when a shard is gone for good."""
        self._waiting.append(worker)
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: ready() or self._error is not None)
        finally:
            self._waiting.remove(worker)
            if self._books is not None:
                self._books.heard(worker, monotonic_s())
        if self._error is not None:
            raise PoolError(self._error)

    async def _send(self) -> None:
        """Updates to all shards, one after the other."""
        while True:
            update = await self._outbox.get()
            try:
                await asyncio.gather(*[shard.apply.remote(update) for shard in self._shards])
            except ray.exceptions.RayError as error:
                self._error = (
                    "a shard of the weights is gone: it died more often than limits.max_restarts "
                    f"allows, or could not be started again: {error}"
                )
                async with self._changed:
                    self._changed.notify_all()
                return

    async def _watch(self) -> None:
        """What silent workers have goes to others."""
        while True:
            await asyncio.sleep(_WATCH_S)
            assert self._books is not None
            for worker in self._books.silent(monotonic_s(), self._waiting):
                await self.leave(worker)


class ShardHolder:
    """One shard, as an actor. It is built when it is first needed; one that was started again goes
    on from its last snapshot, or from the start of the phase.
    """

    def __init__(self, job: Job, info: DataInfo, index: int, count: int, clock: str) -> None:
        """`clock`: its name. (A handle would be lost with whoever gave it, and Ray says so.)"""
        self._job, self._info, self._index, self._count = job, info, index, count
        self._clock: Any = ray.get_actor(clock)
        self._shard: Shard | None = None
        self._phase = ""
        self._published: tuple[int, Any] | None = None
        self._lost_updates = 0
        self._building = asyncio.Lock()
        self._changed = asyncio.Condition()

    async def prepare(self) -> None:
        """Build the shard, which takes seconds, before it is needed."""
        await self._there()

    async def load(self, phase: Phase, boxed_state: list[Any]) -> None:
        """Begin a phase at this state."""
        shard, state = await self._there(), await boxed_state[0]
        shard.load(state, phase.decay)
        self._phase, self._published, self._lost_updates = phase.id, None, 0

    async def add(self, phase: str, share: int, gradient: Any) -> None:
        """See `Server.push`."""
        shard = await self._there()
        if phase == self._phase:
            from raytrain_opt.train.parameter_server import from_wire, wire_dtype

            wire = wire_dtype(self._job.parallel.compression, shard.dtype)
            shard.add(share, from_wire(gradient, wire))

    async def apply(self, update: Update) -> None:
        """Make this update."""
        shard = await self._there()
        if update.phase != self._phase:
            return
        shard.apply(update)
        if shard.version % self._job.parallel.snapshot_every == 0:
            self._clock.keep.remote(
                self._phase, self._index, shard.version, _packed(shard.state())
            )
        async with self._changed:
            self._changed.notify_all()

    async def pull(self, at_least: int) -> tuple[int, Any]:
        """Version and flat weights, once they have this version: as they are, or a list with a
        reference, the same for all who ask, so that each node fetches them once.
        """
        shard = await self._until(at_least)
        if self._published is None or self._published[0] != shard.version:
            self._published = (shard.version, _published(shard))
        return self._published

    async def collect(self, version: int) -> tuple[HostState, int, int]:
        """Its part of the state after so many updates; gradients and updates that it lost."""
        shard = await self._until(version)
        return shard.state(), shard.lost, self._lost_updates

    async def _until(self, version: int) -> Shard:
        shard = await self._there()
        async with self._changed:
            await self._changed.wait_for(lambda: shard.version >= version)
        return shard

    async def _there(self) -> Shard:
        async with self._building:
            if self._shard is None:
                shard = _build(self._job, self._info, self._index, self._count)
                await self._recover(shard)
                self._shard = shard
        return self._shard

    async def _recover(self, shard: Shard) -> None:
        found = await self._clock.recover.remote(self._index)
        if found is None:
            return
        phase, version, snapshot, boxed_state = found
        kept, state = (0, await boxed_state[0]) if snapshot is None else _unpacked(*snapshot)
        # Weights of then, at the version of now: what came between is lost for this part.
        shard.load(state, phase.decay, version)
        self._phase, self._lost_updates = phase.id, version - kept


def _packed(state: HostState) -> Snapshot:
    """Arrays and plain values only, which the clock can hold without torch."""
    fields = {n: (t.data, t.shape, t.dtype, t.order) for n, t in state.tensors.items()}
    return fields, state.plain


def _unpacked(version: int, snapshot: Snapshot) -> tuple[int, HostState]:
    from raytrain_opt.train.state import HostState, HostTensor

    tensors, plain = snapshot
    return version, HostState({n: HostTensor(*fields) for n, fields in tensors.items()}, plain)


def _published(shard: Shard) -> Any:
    from raytrain_opt.train.parameter_server import to_wire

    wire = to_wire(shard.weights.buffer, shard.dtype)
    return wire if wire.nbytes < _INLINE_BYTES else [ray.put(wire)]


def _build(job: Job, info: DataInfo, index: int, count: int) -> Shard:
    import torch

    from raytrain_opt.models import build_model
    from raytrain_opt.train.group import use_threads
    from raytrain_opt.train.parameter_server import Shard

    use_threads(1)
    model = build_model(
        job.model, num_classes=info.num_classes, sample_shape=info.sample_shape, seed=job.seed
    )
    if job.channels_last and len(info.sample_shape) == 3:
        model = model.to(memory_format=torch.channels_last)
    steps = info.steps_per_epoch(job.global_batch_size)
    return Shard(job, model, index, count, steps)


@dataclass(frozen=True)
class ServerHandles:
    """The actors, for the driver and for workers."""

    clock: Any
    shards: list[Any]


@contextmanager
def parameter_server(job: Job, info: DataInfo) -> Iterator[ServerHandles | None]:
    """Start the clock and the shards, spread over the nodes; they end with the block. None where
    all workers take each step together.
    """
    if job.parallel.mode == "sync":
        yield None
        return
    name = f"clock-{secrets.token_hex(8)}"
    clock: Any = ray.remote(Clock).options(num_cpus=0, max_concurrency=10_000, name=name).remote()
    holder = ray.remote(ShardHolder).options(
        num_cpus=0,
        max_concurrency=10_000,
        max_restarts=job.limits.max_restarts,
        # What was asked of a shard that died is asked again of the one in its place.
        max_task_retries=-1,
        scheduling_strategy="SPREAD",
    )
    count = job.parallel.shards or len(alive_nodes())
    shards: list[Any] = [holder.remote(job, info, i, count, name) for i in range(count)]
    for shard in shards:
        shard.prepare.remote()
    try:
        yield ServerHandles(clock, shards)
    finally:
        for actor in (clock, *shards):
            ray.kill(actor)
