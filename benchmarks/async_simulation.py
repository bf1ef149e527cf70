"""Workers, shards and a network on a simulated clock; the product's `SspScheduler` decides.

Nothing is computed and nobody waits: durations are given, events are in a heap. A worker acts as
in `raytrain_opt.async_training.worker_loop`: while it computes, it sends its last gradient and
fetches its next weights, as late as it can without waiting for them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from raytrain_opt.async_training.scheduler import EpochPhase, MicroBatchDone, SspScheduler, Update

# As in `async_training.worker_loop`: a fetch begins this many times the duration of the last
# fetch before the weights are needed.
PREFETCH_FACTOR = 2.0


@dataclass
class Network:
    """Nodes with one link each, which carries `bytes_per_s` in each direction.

    A link never pauses while data is waiting (many flows use it at once, as with TCP; switches
    are no limit). Worker w is on node w % nodes; the first `shards` nodes have a shard each.
    Workers of a node fetch the weights of one version once, as with Ray's object store. Messages
    within a node are free. A shard adds up gradients at `adds_per_s` bytes per second.
    """

    nodes: int
    shards: int
    weight_bytes: float
    gradient_bytes: float
    bytes_per_s: float
    adds_per_s: float = 4e9
    _out: list[float] = field(default_factory=list)
    _in: list[float] = field(default_factory=list)
    _cpu: list[float] = field(default_factory=list)
    _fetched: dict[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._out, self._in = [0.0] * self.nodes, [0.0] * self.nodes
        self._cpu = [0.0] * self.shards

    def pull(self, worker: int, version: int, now_s: float) -> float:
        """Return the time at which the weights have arrived."""
        node = worker % self.nodes
        known_s = self._fetched.get((node, version))
        if known_s is None:
            part = self.weight_bytes / self.shards
            known_s = max(self._send(s, node, part, now_s) for s in range(self.shards))
            self._fetched[node, version] = known_s
        return max(now_s, known_s)

    def push(self, worker: int, now_s: float) -> float:
        """Return the time at which all shards have added the gradient."""
        part, node = self.gradient_bytes / self.shards, worker % self.nodes
        for shard in range(self.shards):
            arrived_s = self._send(node, shard, part, now_s)
            self._cpu[shard] = max(arrived_s, self._cpu[shard]) + part / self.adds_per_s
        return max(self._cpu)

    def _send(self, source: int, target: int, size: float, now_s: float) -> float:
        if source == target:
            return now_s
        took_s = size / self.bytes_per_s
        self._out[source] = max(now_s, self._out[source]) + took_s
        self._in[target] = max(now_s, self._in[target]) + took_s
        return max(self._out[source], self._in[target])


class NoNetwork:
    """A network that delivers everything at once."""

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


class Simulation:
    """One phase with workers that take `seconds[w]` for a micro-batch.

    `on_fetch(worker)` is called when a worker reads the current weights,
    `on_begin(worker, micro_batch)` when it begins a micro-batch on the weights it has, and
    `on_update` for each update.
    """

    def __init__(
        self,
        phase: EpochPhase,
        seconds: Sequence[float],
        network: Network | NoNetwork,
        on_begin: Callable[[int, int], MicroBatchDone],
        on_update: Callable[[Update], None] = lambda _: None,
        on_fetch: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.clock, self.seconds, self.network = SspScheduler(phase), seconds, network
        self._on_begin, self._on_update, self._on_fetch = on_begin, on_update, on_fetch
        self._workers = [_Worker() for _ in seconds]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._blocked: list[int] = []

    def run(self) -> float:
        """Simulate the phase and return its duration in simulated seconds."""
        now_s = 0.0
        for worker in range(len(self.seconds)):
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
        if not self.clock.may_begin(worker.micro_batch):
            self._blocked.append(number)
            return
        if not self.clock.new_enough(worker.version):
            self._fetch(number, now_s)
        if worker.ready_s > now_s:
            self._schedule(worker.ready_s, partial(self._ask, number))
            return
        self._begin(number, worker.micro_batch, now_s)

    def _begin(self, number: int, micro_batch: int, now_s: float) -> None:
        worker = self._workers[number]
        self.clock.begin(number, micro_batch, worker.version, now_s)
        done = self._on_begin(number, micro_batch)
        end_s = now_s + self.seconds[number]
        if self.clock.phase.bound != 0:
            fetch_s = max(now_s, end_s - PREFETCH_FACTOR * worker.fetch_s)
            self._schedule(fetch_s, partial(self._fetch, number))
        worker.micro_batch = None
        self._schedule(end_s, partial(self._computed, number, done))

    def _computed(self, number: int, done: MicroBatchDone, now_s: float) -> None:
        """Send the gradient after the one before it; one is on the way at a time."""
        worker = self._workers[number]
        sent_s = max(now_s, worker.pushed_s)
        worker.pushed_s = self.network.push(number, sent_s)
        self._schedule(worker.pushed_s, partial(self._arrived, number, done))
        self._schedule(sent_s, partial(self._ask, number))

    def _arrived(self, number: int, done: MicroBatchDone, now_s: float) -> None:
        for update in self.clock.done(number, done, now_s):
            self._on_update(update)
        blocked, self._blocked = self._blocked, []
        for other in blocked:
            self._ask(other, now_s)
