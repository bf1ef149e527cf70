"""Staleness never exceeds its bound, every share counts once, nobody waits without a reason."""

from __future__ import annotations

import heapq
import random
from itertools import count

import pytest

from raytrain_opt.train.share_clock import Done, Phase, ShareClock, Staleness, Update

BOUNDS = [0, 1, 2, 4, 16, None]


def phase(updates: int, shares: int, bound: int | None, **settings: object) -> Phase:
    lrs = tuple(0.1 / (i + 1) for i in range(updates))
    return Phase("1.0", 1, 0, lrs, shares, bound, **settings)  # type: ignore[arg-type]


def done(number: int) -> Done:
    return Done(number, loss_sum=2.0, samples=4, correct=3, skipped=1)


class Simulated:
    """Workers that take `seconds[w]` for a share, on a clock of their own. Each reads the weights
    before it asks whether it may begin, and reads them once more where they are too old.
    """

    def __init__(self, clock: ShareClock, seconds: list[float], seed: int = 0) -> None:
        self.clock, self.seconds, self.now_s = clock, seconds, 0.0
        self.random = random.Random(seed)
        self.updates: list[Update] = []
        self.versions: dict[int, int] = {}
        self._events: list[tuple[float, int, int, int]] = []
        self._order = count()
        self._blocked: list[int] = []
        self._claimed: dict[int, int] = {}

    def run(self, reads_early: bool = False) -> float:
        """Until all is done; returns when."""
        for worker in range(len(self.seconds)):
            self._ask(worker, reads_early)
        while not self.clock.finished:
            self.now_s, _, worker, number = heapq.heappop(self._events)
            self.updates += self.clock.done(worker, done(number), self.now_s)
            for other in [worker, *self._blocked]:
                self._blocked = [w for w in self._blocked if w != other]
                self._ask(other, reads_early)
        return self.now_s

    def _ask(self, worker: int, reads_early: bool) -> None:
        number = self._claimed.get(worker)
        if number is None:
            number = self.clock.claim(worker, self.now_s)
        if number is None:
            return
        self._claimed[worker] = number
        if not self.clock.may_begin(number):
            self._blocked.append(worker)
            return
        version = self.clock.version
        if reads_early:
            version = max(0, version - self.random.randrange(3))
        if not self.clock.new_enough(version):
            version = self.clock.version
        self.clock.begin(worker, number, version, self.now_s)
        self.versions[number] = version
        del self._claimed[worker]
        took_s = self.seconds[worker] * self.random.uniform(0.9, 1.1)
        heapq.heappush(self._events, (self.now_s + took_s, next(self._order), worker, number))


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("reads_early", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_no_gradient_is_staler_than_the_bound_and_none_is_lost(
    bound: int | None, reads_early: bool, seed: int
) -> None:
    speeds = random.Random(seed)
    workers, shares = speeds.randint(1, 8), speeds.randint(1, 6)
    seconds = [speeds.choice([1.0, 1.0, 1.0, 4.0, 30.0]) for _ in range(workers)]
    clock = ShareClock(phase(25, shares, bound))
    run = Simulated(clock, seconds, seed)
    run.run(reads_early)
    assert [update.number for update in run.updates] == list(range(25))
    assert [update.lr for update in run.updates] == list(clock.phase.lrs)
    numbers = [number for update in run.updates for number, _ in update.weights]
    assert sorted(numbers) == list(range(25 * shares))
    assert clock.totals.samples == 4 * 25 * shares
    staleness = [u.number - run.versions[n] for u in run.updates for n, _ in u.weights]
    assert min(staleness) >= 0
    assert bound is None or max(staleness) <= bound
    histogram = [staleness.count(k) for k in range(max(staleness) + 1)]
    assert clock.staleness == Staleness(tuple(histogram))


@pytest.mark.parametrize("shares", [2, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_without_staleness_each_update_is_one_step(shares: int, seed: int) -> None:
    clock = ShareClock(phase(10, shares, 0, in_order=True))
    run = Simulated(clock, [1.0, 2.0, 5.0, 0.3], seed)
    run.run()
    for update in run.updates:
        expected = [shares * update.number + i for i in range(shares)]
        assert update.weights == tuple((number, 1 / shares) for number in expected)


def throughput(bound: int | None, seconds: list[float], updates: int = 200) -> float:
    clock = ShareClock(phase(updates, len(seconds), bound))
    return clock.phase.size / Simulated(clock, seconds).run()


def test_a_slow_worker_slows_the_others_only_where_the_bound_says_so() -> None:
    slow, even = [1.0, 1.0, 1.0, 4.0], [1.0] * 4
    assert throughput(None, slow) == pytest.approx(3.25, rel=0.03)
    assert throughput(16, slow) == pytest.approx(3.25, rel=0.03)
    assert throughput(4, slow) > 3.0
    assert throughput(0, slow) < 1.6  # a step waits for it, if it got a share of it
    assert throughput(None, even) == pytest.approx(4.0, rel=0.03)
    assert throughput(1, even) > 3.7


def test_a_stale_gradient_is_damped_where_that_is_wanted() -> None:
    clock = ShareClock(phase(3, 1, None, damped=True))
    for worker in range(3):
        assert clock.claim(worker, 0.0) == worker
        clock.begin(worker, worker, 0, 0.0)
    weights = [clock.done(worker, done(worker), 1.0)[0].weights for worker in range(3)]
    assert weights == [((0, 1.0),), ((1, 1 / 2),), ((2, 1 / 3),)]


def test_what_a_dead_worker_had_goes_to_others_and_its_late_gradient_counts_for_nothing() -> None:
    clock = ShareClock(phase(2, 2, 4))
    assert [clock.claim(0, 0.0), clock.claim(1, 0.0)] == [0, 1]
    clock.begin(0, 0, 0, 0.0)
    clock.begin(1, 1, 0, 0.0)
    clock.leave(0)
    assert clock.claim(1, 1.0) == 0
    clock.begin(1, 0, 0, 1.0)
    assert clock.done(0, done(0), 2.0) == []
    assert clock.totals.samples == 0
    assert clock.done(1, done(0), 2.0) == []
    [update] = clock.done(1, done(1), 2.0)
    assert [number for number, _ in update.weights] == [0, 1]
    assert clock.done(1, done(1), 2.0) == []
    assert clock.totals.samples == 8


def test_an_update_that_waited_for_a_dead_worker_is_made() -> None:
    clock = ShareClock(phase(3, 1, 1))
    for worker in (0, 1):
        clock.claim(worker, 0.0)
        clock.begin(worker, worker, 0, 0.0)
    assert len(clock.done(1, done(1), 1.0)) == 1
    clock.claim(1, 1.0)
    clock.begin(1, 2, 1, 1.0)
    assert clock.done(1, done(2), 2.0) == []
    [update] = clock.leave(0)
    assert [number for number, _ in update.weights] == [2]


def test_silence_is_measured_by_a_workers_own_shares() -> None:
    clock = ShareClock(phase(4, 2, None))
    for worker, seconds in ((0, 2.0), (1, 30.0)):
        number = clock.claim(worker, 0.0)
        assert number is not None
        clock.begin(worker, number, 0, 0.0)
        clock.done(worker, done(number), seconds)
        clock.claim(worker, seconds)
    assert clock.silent(21.0) == []
    assert clock.silent(23.0) == [0]
    assert clock.silent(23.0, waiting=[0]) == []
    assert clock.silent(331.0) == [0, 1]


def test_a_worker_that_has_done_nothing_yet_may_take_its_time() -> None:
    clock = ShareClock(phase(4, 2, None))
    clock.claim(0, 0.0)
    assert clock.silent(100.0) == []
    assert clock.silent(121.0) == [0]


def test_shares_have_their_places_in_the_epoch() -> None:
    at = Phase("2.5", 2, 5, (0.1, 0.1), 3, None)
    assert [at.place(number) for number in range(at.size)] == [
        (5, 0), (5, 1), (5, 2), (6, 0), (6, 1), (6, 2),
    ]  # fmt: skip


def test_the_histogram_as_it_is_written_down() -> None:
    record = Staleness((6, 3, 1)).to_record()
    assert record == {"counts": [6, 3, 1], "mean": 0.5, "max": 2}
    assert Staleness().to_record() == {"counts": [], "mean": 0.0, "max": -1}
