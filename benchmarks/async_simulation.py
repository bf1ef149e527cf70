"""Workers, shards and a network on a simulated clock; the product's `ShareClock` decides.

Nothing is computed here and nobody waits: times are given, events are in a heap. What a worker
does is what `raytrain_opt.train.async_trainer` does: it sends the last gradient and fetches the
next weights while it computes, and fetches as late as will do.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from raytrain_opt.train.share_clock import Done, Phase, ShareClock, Update

# As `train.async_trainer` has it: weights are asked for so many times as long before they are
# wanted as fetching them took.
EARLY = 2.0


@dataclass
class Network:
    """Nodes with one link each; in either direction it carries `bytes_per_s`, and never pauses
    while there is anything to carry (many flows share it, as with TCP; switches are no limit).

    Worker w is on node w % nodes; each node has a shard, or the first `shards` of them. Workers of
    a node fetch weights of one version once, as Ray's object store does. A message within a node
    is free. A shard adds up gradients at `adds_per_s` bytes.
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
        """When the weights have arrived."""
        node = worker % self.nodes
        known_s = self._fetched.get((node, version))
        if known_s is None:
            part = self.weight_bytes / self.shards
            known_s = max(self._send(s, node, part, now_s) for s in range(self.shards))
            self._fetched[node, version] = known_s
        return max(now_s, known_s)

    def push(self, worker: int, now_s: float) -> float:
        """When all shards have added the gradient."""
        part, node = self.gradient_bytes / self.shards, worker % self.nodes
        for shard in range(self.shards):
            there_s = self._send(node, shard, part, now_s)
            self._cpu[shard] = max(there_s, self._cpu[shard]) + part / self.adds_per_s
        return max(self._cpu)

    def _send(self, source: int, target: int, size: float, now_s: float) -> float:
        if source == target:
            return now_s
        took_s = size / self.bytes_per_s
        self._out[source] = max(now_s, self._out[source]) + took_s
        self._in[target] = max(now_s, self._in[target]) + took_s
        return max(self._out[source], self._in[target])


class NoNetwork:
    """Everything is where it is wanted."""

    def pull(self, worker: int, version: int, now_s: float) -> float:
        return now_s

    def push(self, worker: int, now_s: float) -> float:
        return now_s


@dataclass
class _Worker:
    share: int | None = None
    version: int = 0  # of the weights that are there
    ready_s: float = 0.0  # when they are
    took_s: float = 0.0  # to fetch them
    pushed_s: float = 0.0


class Simulation:
    """Workers that take `seconds[w]` for a share, from the start to the end of a phase.

    `on_fetch(worker)` is called when it reads the weights of that time, `on_begin(worker, share)`
    when it begins a share on the weights that it has, and `on_update` for each update.
    """

    def __init__(
        self,
        phase: Phase,
        seconds: Sequence[float],
        network: Network | NoNetwork,
        on_begin: Callable[[int, int], Done],
        on_update: Callable[[Update], None] = lambda _: None,
        on_fetch: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.clock, self.seconds, self.network = ShareClock(phase), seconds, network
        self._on_begin, self._on_update, self._on_fetch = on_begin, on_update, on_fetch
        self._workers = [_Worker() for _ in seconds]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._blocked: list[int] = []

    def run(self) -> float:
        """Simulated seconds that the phase took."""
        now_s = 0.0
        for worker in range(len(self.seconds)):
            self._at(0.0, lambda at_s, w=worker: self._fetch(w, at_s))
            self._at(0.0, lambda at_s, w=worker: self._ask(w, at_s))
        while not self.clock.finished:
            now_s, _, event = heapq.heappop(self._events)
            event(now_s)
        return now_s

    def _at(self, when_s: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), event))

    def _fetch(self, worker: int, now_s: float) -> None:
        at = self._workers[worker]
        at.version = self.clock.version
        at.ready_s = self.network.pull(worker, at.version, now_s)
        at.took_s = at.ready_s - now_s
        self._on_fetch(worker)

    def _ask(self, worker: int, now_s: float) -> None:
        at = self._workers[worker]
        if at.share is None:
            at.share = self.clock.claim(worker, now_s)
        if at.share is None:
            return
        if not self.clock.may_begin(at.share):
            self._blocked.append(worker)
            return
        if not self.clock.new_enough(at.version):
            self._fetch(worker, now_s)
        if at.ready_s > now_s:
            self._at(at.ready_s, lambda at_s: self._ask(worker, at_s))
            return
        self._begin(worker, at, at.share, now_s)

    def _begin(self, worker: int, at: _Worker, share: int, now_s: float) -> None:
        self.clock.begin(worker, share, at.version, now_s)
        done = self._on_begin(worker, share)
        end_s = now_s + self.seconds[worker]
        if self.clock.phase.bound != 0:
            fetch_s = max(now_s, end_s - EARLY * at.took_s)
            self._at(fetch_s, lambda at_s: self._fetch(worker, at_s))
        at.share = None
        self._at(end_s, lambda at_s: self._computed(worker, done, at_s))

    def _computed(self, worker: int, done: Done, now_s: float) -> None:
        """One gradient is on the way at a time."""
        at = self._workers[worker]
        sent_s = max(now_s, at.pushed_s)
        at.pushed_s = self.network.push(worker, sent_s)
        self._at(at.pushed_s, lambda at_s: self._arrived(worker, done, at_s))
        self._at(sent_s, lambda at_s: self._ask(worker, at_s))

    def _arrived(self, worker: int, done: Done, now_s: float) -> None:
        for update in self.clock.done(worker, done, now_s):
            self._on_update(update)
        blocked, self._blocked = self._blocked, []
        for other in blocked:
            self._ask(other, now_s)
