"""Workers, shards and a network on a simulated clock; the product's `SspScheduler` decides.

Nothing is computed and nobody waits: durations are given, events are in a heap. A worker acts as
in `raytrain_opt.async_training.worker_loop`: while it computes, it sends its last gradient and
fetches its next weights, as late as it can without waiting for them.

What software costs is given as `Costs`: each shard is one thread,
which makes updates and copies of the weights one after the other; a worker's copies and its calls
of the coordinator are part of its own time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from raytrain_opt.async_training.scheduler import EpochPhase, MicroBatchDone, SspScheduler

# As in `async_training.worker_loop`: a fetch begins this many times the duration of the last
# fetch before the weights are needed.
PREFETCH_FACTOR = 2.0


@dataclass(frozen=True)
class Costs:
    """Seconds of software: per byte of a shard's part, or of all weights in a worker; per call.

    `update_s`: reading a gradient and the optimizer's step in a shard. `publish_s`: the copy of
    the weights that is sent, and storing it. `worker_s`: what a worker does with weights and its
    gradient. `call_s`: a call of an actor and its answer.
    """

    update_s: float = 0.0
    publish_s: float = 0.0
    worker_s: float = 0.0
    call_s: float = 0.0


# What happens at a time.
Event = Callable[[float], None]


class Clock:
    """Simulated time: events in the order of their times."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Event]] = []
        self._order = count()

    def schedule(self, time_s: float, event: Event) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), event))

    def step(self) -> float:
        """Let the next event happen; return its time."""
        now_s, _, event = heapq.heappop(self._events)
        event(now_s)
        return now_s


class _All:
    """Happens when `missing` events have happened."""

    def __init__(self, missing: int) -> None:
        self._missing = missing
        self._waiting: list[Event] = []

    def __call__(self, now_s: float) -> None:
        self._missing -= 1
        if not self._missing:
            for event in self._waiting:
                event(now_s)

    def then(self, event: Event, now_s: float) -> None:
        """Let `event` happen with it, or now if it has happened."""
        if self._missing:
            self._waiting.append(event)
        else:
            event(now_s)


@dataclass
class Network:
    """Nodes with one link each, which carries `bytes_per_s` in each direction.

    A link never pauses while data is waiting (many flows use it at once, as with TCP; switches
    are no limit), nor does a shard's thread. What waits for either is served in the order in which
    it came. Worker w is on node w % nodes; shard s is on node s % nodes. Workers of a node fetch
    the weights of one version once, as with Ray's object store. Messages within a node are free.
    """

    nodes: int
    shards: int
    weight_bytes: float
    gradient_bytes: float
    bytes_per_s: float
    costs: Costs = Costs()
    clock: Clock = field(default_factory=Clock)
    _out: list[float] = field(default_factory=list)
    _in: list[float] = field(default_factory=list)
    _cpu: list[float] = field(default_factory=list)
    _published: dict[tuple[int, int], _All] = field(default_factory=dict)
    _fetched: dict[tuple[int, int], _All] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._out, self._in = [0.0] * self.nodes, [0.0] * self.nodes
        self._cpu = [0.0] * self.shards

    @property
    def worker_s(self) -> float:
        """Seconds of software in a worker for each micro-batch: copies, and two calls."""
        copied = self.weight_bytes + self.gradient_bytes
        return self.costs.worker_s * copied + 2 * self.costs.call_s

    def pull(self, worker: int, version: int, now_s: float, arrived: Event) -> None:
        """Fetch the weights; `arrived` happens when they are there."""
        node, part = worker % self.nodes, self.weight_bytes / self.shards
        if (fetched := self._fetched.get((node, version))) is None:
            fetched = self._fetched[node, version] = _All(1)
            all_parts = _All(self.shards)
            all_parts.then(self._call(fetched), now_s)
            for shard in range(self.shards):
                send = partial(self._send, shard, node, part, all_parts)
                self._publish(shard, version, part, now_s).then(send, now_s)
        fetched.then(arrived, now_s)

    def push(self, worker: int, now_s: float, applied: Event) -> None:
        """Send a gradient; `applied` happens when all shards have applied it."""
        part, node = self.gradient_bytes / self.shards, worker % self.nodes
        everywhere = _All(self.shards)
        everywhere.then(self._call(applied), now_s)
        update_s = part * self.costs.update_s
        for shard in range(self.shards):
            update = partial(self._compute, shard, update_s, everywhere)
            self._send(node, shard, part, update, now_s)

    def _publish(self, shard: int, version: int, part: float, now_s: float) -> _All:
        if (shard, version) not in self._published:
            published = self._published[shard, version] = _All(1)
            self._compute(shard, part * self.costs.publish_s, published, now_s)
        return self._published[shard, version]

    def _call(self, event: Event) -> Event:
        return lambda now_s: self.clock.schedule(now_s + self.costs.call_s, event)

    def _compute(self, shard: int, seconds: float, done: Event, now_s: float) -> None:
        self._cpu[shard] = max(now_s, self._cpu[shard]) + seconds
        self.clock.schedule(self._cpu[shard], done)

    def _send(self, source: int, target: int, size: float, arrived: Event, now_s: float) -> None:
        source, target = source % self.nodes, target % self.nodes
        arrived_s = now_s
        if source != target:
            took_s = size / self.bytes_per_s
            self._out[source] = max(now_s, self._out[source]) + took_s
            self._in[target] = max(now_s, self._in[target]) + took_s
            arrived_s = max(self._out[source], self._in[target])
        self.clock.schedule(arrived_s, arrived)


@dataclass
class _Worker:
    micro_batch: int | None = None
    version: int = 0  # of the weights it has, or fetches
    fetch_began_s: float | None = None  # None: they have arrived
    fetch_s: float = 0.0  # how long it took to fetch them
    pushing: bool = False
    # What happens next when the weights have arrived, and when the last gradient is applied.
    on_fetched: Event | None = None
    on_pushed: Event | None = None


# How long a worker computes its next micro-batch, for its number.
Seconds = Callable[[int], float]


class Simulation:
    """One phase with workers whose micro-batches take `seconds(w)`."""

    def __init__(
        self,
        phase: EpochPhase,
        workers: int,
        seconds: Seconds,
        network: Network,
    ) -> None:
        self.clock, self.seconds, self.network = SspScheduler(phase), seconds, network
        self._workers = [_Worker() for _ in range(workers)]
        self._schedule = network.clock.schedule
        self._blocked: list[int] = []

    def run(self) -> float:
        """Simulate the phase and return its duration in simulated seconds."""
        now_s = 0.0
        for worker in range(len(self._workers)):
            self._schedule(0.0, partial(self._fetch, worker))
            self._schedule(0.0, partial(self._ask, worker))
        while not self.clock.finished:
            now_s = self.network.clock.step()
        return now_s

    def _fetch(self, number: int, now_s: float) -> None:
        worker = self._workers[number]
        worker.version, worker.fetch_began_s = self.clock.version, now_s
        self.network.pull(number, worker.version, now_s, partial(self._fetched, number, now_s))

    def _fetched(self, number: int, began_s: float, now_s: float) -> None:
        worker = self._workers[number]
        if began_s != worker.fetch_began_s:  # it fetches newer ones
            return
        worker.fetch_began_s, worker.fetch_s = None, now_s - began_s
        if (event := worker.on_fetched) is not None:
            worker.on_fetched = None
            event(now_s)

    def _ask(self, number: int, now_s: float) -> None:
        worker = self._workers[number]
        if worker.micro_batch is None:
            worker.micro_batch = self.clock.claim(number)
        if worker.micro_batch is None:
            return
        if not self.clock.may_begin():
            self._blocked.append(number)
            return
        if not self.clock.may_begin(worker.version):
            self._fetch(number, now_s)
        if worker.fetch_began_s is not None:
            worker.on_fetched = partial(self._ask, number)
            return
        self._begin(number, worker.micro_batch, now_s)

    def _begin(self, number: int, micro_batch: int, now_s: float) -> None:
        worker = self._workers[number]
        self.clock.begin(micro_batch, worker.version)
        end_s = now_s + self.seconds(number) + self.network.worker_s
        fetch_s = max(now_s, end_s - PREFETCH_FACTOR * worker.fetch_s)
        worker.micro_batch = None
        self._schedule(fetch_s, partial(self._fetch, number))
        self._schedule(end_s, partial(self._computed, number, micro_batch, worker.version))

    def _computed(self, number: int, micro_batch: int, version: int, now_s: float) -> None:
        """Send the gradient after the one before it; one is on the way at a time."""
        worker = self._workers[number]
        if worker.pushing:
            worker.on_pushed = partial(self._computed, number, micro_batch, version)
            return
        worker.pushing = True
        self.network.push(number, now_s, partial(self._arrived, number, micro_batch, version))
        self._schedule(now_s, partial(self._ask, number))

    def _arrived(self, number: int, micro_batch: int, version: int, now_s: float) -> None:
        worker = self._workers[number]
        worker.pushing = False
        staleness = max(0, self.clock.version - version)
        done = MicroBatchDone(micro_batch, 0.0, 0, 0, staleness=staleness)
        self.clock.done(number, done)
        blocked, self._blocked = self._blocked, []
        for other in blocked:
            self._ask(other, now_s)
        if (event := worker.on_pushed) is not None:
            worker.on_pushed = None
            event(now_s)
