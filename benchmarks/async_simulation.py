"""Workers, shards and a network on a simulated clock; the product's `SspScheduler` decides.

Nothing is computed and nobody waits: durations are given, events are in a heap. A worker acts as
in `raytrain_opt.async_training.worker_loop`: while it computes, it sends its last gradient and
fetches its next weights, as late as it can without waiting for them.

What software costs is measured (`async_costs.py`) and given as `Costs`: each shard is one thread,
which makes updates and copies of the weights one after the other; a worker's copies and its calls
of the coordinator are part of its own time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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


@dataclass
class Network:
    """Nodes with one link each, which carries `bytes_per_s` in each direction.

    A link never pauses while data is waiting (many flows use it at once, as with TCP; switches
    are no limit). Worker w is on node w % nodes; shard s is on node s % nodes. Workers of a node
    fetch the weights of one version once, as with Ray's object store. Messages within a node are
    free.
    """

    nodes: int
    shards: int
    weight_bytes: float
    gradient_bytes: float
    bytes_per_s: float
    costs: Costs = Costs()
    _out: list[float] = field(default_factory=list)
    _in: list[float] = field(default_factory=list)
    _cpu: list[float] = field(default_factory=list)
    _published: dict[int, float] = field(default_factory=dict)
    _fetched: dict[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._out, self._in = [0.0] * self.nodes, [0.0] * self.nodes
        self._cpu = [0.0] * self.shards

    @property
    def worker_s(self) -> float:
        """Seconds of software in a worker for each micro-batch: copies, and two calls."""
        copied = self.weight_bytes + self.gradient_bytes
        return self.costs.worker_s * copied + 2 * self.costs.call_s

    def pull(self, worker: int, version: int, now_s: float) -> float:
        """Return the time at which the weights have arrived."""
        node, part = worker % self.nodes, self.weight_bytes / self.shards
        if (node, version) not in self._fetched:
            if version not in self._published:
                self._published[version] = max(
                    self._compute(s, part * self.costs.publish_s, now_s)
                    for s in range(self.shards)
                )
            ready_s = max(now_s, self._published[version])
            arrived_s = [self._send(s, node, part, ready_s) for s in range(self.shards)]
            self._fetched[node, version] = max(arrived_s) + self.costs.call_s
        return max(now_s, self._fetched[node, version])

    def push(self, worker: int, now_s: float) -> float:
        """Return the time at which all shards have applied the gradient."""
        part, node = self.gradient_bytes / self.shards, worker % self.nodes
        return self.costs.call_s + max(
            self._compute(s, part * self.costs.update_s, self._send(node, s, part, now_s))
            for s in range(self.shards)
        )

    def _compute(self, shard: int, seconds: float, now_s: float) -> float:
        self._cpu[shard] = max(now_s, self._cpu[shard]) + seconds
        return self._cpu[shard]

    def _send(self, source: int, shard: int, size: float, now_s: float) -> float:
        target = shard % self.nodes
        source %= self.nodes
        if source == target:
            return now_s
        took_s = size / self.bytes_per_s
        self._out[source] = max(now_s, self._out[source]) + took_s
        self._in[target] = max(now_s, self._in[target]) + took_s
        return max(self._out[source], self._in[target])


class NoNetwork:
    """A network and software that cost no time."""

    worker_s = 0.0

    def pull(self, worker: int, version: int, now_s: float) -> float:
        return now_s

    def push(self, worker: int, now_s: float) -> float:
        return now_s


@dataclass
class _Worker:
    micro_batch: int | None = None
    version: int = 0  # of the weights it has
    ready_s: float = 0.0  # when these weights have arrived
    fetch_s: float = 0.0  # how long it took to fetch them
    pushed_s: float = 0.0


# How long a worker computes its next micro-batch, for its number.
Seconds = Callable[[int], float]


class Simulation:
    """One phase with workers whose micro-batches take `seconds(w)`.

    `on_fetch(worker)` is called when a worker reads the current weights, `on_begin(worker,
    micro_batch)` when it begins a micro-batch on the weights it has, and `on_update(worker,
    micro_batch, version)` when the gradient, of weights of this version, has arrived.
    """

    def __init__(
        self,
        phase: EpochPhase,
        workers: int,
        seconds: Seconds,
        network: Network | NoNetwork,
        on_begin: Callable[[int, int], MicroBatchDone],
        on_update: Callable[[int, int, int], None] = lambda *_: None,
        on_fetch: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.clock, self.seconds, self.network = SspScheduler(phase), seconds, network
        self._on_begin, self._on_update, self._on_fetch = on_begin, on_update, on_fetch
        self._workers = [_Worker() for _ in range(workers)]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._blocked: list[int] = []

    def run(self) -> float:
        """Simulate the phase and return its duration in simulated seconds."""
        now_s = 0.0
        for worker in range(len(self._workers)):
            self._schedule(0.0, partial(self._fetch, worker))
            self._schedule(0.0, partial(self._ask, worker))
        while not self.clock.finished:
            now_s, _, event = heapq.heappop(self._events)
            event(now_s)
        return now_s

    def _schedule(self, time_s: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), event))

    def _fetch(self, number: int, now_s: float) -> None:
        worker = self._workers[number]
        worker.version = self.clock.version
        worker.ready_s = self.network.pull(number, worker.version, now_s)
        worker.fetch_s = worker.ready_s - now_s
        self._on_fetch(number)

    def _ask(self, number: int, now_s: float) -> None:
        worker = self._workers[number]
        if worker.micro_batch is None:
            worker.micro_batch = self.clock.claim(number, now_s)
        if worker.micro_batch is None:
            return
        if not self.clock.may_begin():
            self._blocked.append(number)
            return
        if not self.clock.may_begin(worker.version):
            self._fetch(number, now_s)
        if worker.ready_s > now_s:
            self._schedule(worker.ready_s, partial(self._ask, number))
            return
        self._begin(number, worker.micro_batch, now_s)

    def _begin(self, number: int, micro_batch: int, now_s: float) -> None:
        worker = self._workers[number]
        self.clock.begin(number, micro_batch, worker.version, now_s)
        done = self._on_begin(number, micro_batch)
        end_s = now_s + self.seconds(number) + self.network.worker_s
        fetch_s = max(now_s, end_s - PREFETCH_FACTOR * worker.fetch_s)
        worker.micro_batch = None
        self._schedule(fetch_s, partial(self._fetch, number))
        self._schedule(end_s, partial(self._computed, number, done, worker.version))

    def _computed(self, number: int, done: MicroBatchDone, version: int, now_s: float) -> None:
        """Send the gradient after the one before it; one is on the way at a time."""
        worker = self._workers[number]
        sent_s = max(now_s, worker.pushed_s)
        worker.pushed_s = self.network.push(number, sent_s)
        self._schedule(worker.pushed_s, partial(self._arrived, number, done, version))
        self._schedule(sent_s, partial(self._ask, number))

    def _arrived(self, number: int, done: MicroBatchDone, version: int, now_s: float) -> None:
        self._on_update(number, done.number, version)
        staleness = max(0, self.clock.version - version)
        self.clock.done(number, replace(done, staleness=staleness), now_s)
        blocked, self._blocked = self._blocked, []
        for other in blocked:
            self._ask(other, now_s)
