"""Staleness never exceeds its bound, every micro-batch counts once, nobody waits in vain."""

from __future__ import annotations

import heapq
import random
from itertools import count

import pytest

from raytrain_opt.async_training.scheduler import (
    EpochPhase,
    MicroBatchDone,
    SspScheduler,
    Staleness,
    Update,
)

BOUNDS = [0, 1, 2, 4, 16, None]


def phase(updates: int, micro_batches: int, bound: int | None, **settings: object) -> EpochPhase:
    lrs = tuple(0.1 / (i + 1) for i in range(updates))
    return EpochPhase("1.0", 1, 0, lrs, micro_batches, bound, **settings)  # type: ignore[arg-type]


def done(number: int) -> MicroBatchDone:
    return MicroBatchDone(number, loss_sum=2.0, samples=4, correct=3, skipped=1)


class Simulated:
    """Workers that take `seconds[w]` for a micro-batch, on a simulated clock.

    Each reads the weights before it asks whether it may begin, and again if they are too old.
    """

    def __init__(self, scheduler: SspScheduler, seconds: list[float], seed: int = 0) -> None:
        self.scheduler, self.seconds, self.now_s = scheduler, seconds, 0.0
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
        while not self.scheduler.finished:
            self.now_s, _, worker, number = heapq.heappop(self._events)
            self.updates += self.scheduler.done(worker, done(number), self.now_s)
            for other in [worker, *self._blocked]:
                self._blocked = [w for w in self._blocked if w != other]
                self._ask(other, reads_early)
        return self.now_s

    def _ask(self, worker: int, reads_early: bool) -> None:
        number = self._claimed.get(worker)
        if number is None:
            number = self.scheduler.claim(worker, self.now_s)
        if number is None:
            return
        self._claimed[worker] = number
        if not self.scheduler.may_begin(number):
            self._blocked.append(worker)
            return
        version = self.scheduler.version
        if reads_early:
            version = max(0, version - self.random.randrange(3))
        if not self.scheduler.new_enough(version):
            version = self.scheduler.version
        self.scheduler.begin(worker, number, version, self.now_s)
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
    workers, micro_batches = speeds.randint(1, 8), speeds.randint(1, 6)
    seconds = [speeds.choice([1.0, 1.0, 1.0, 4.0, 30.0]) for _ in range(workers)]
    scheduler = SspScheduler(phase(25, micro_batches, bound))
    run = Simulated(scheduler, seconds, seed)
    run.run(reads_early)
    assert [update.number for update in run.updates] == list(range(25))
    assert [update.lr for update in run.updates] == list(scheduler.phase.lrs)
    numbers = [number for update in run.updates for number, _ in update.weights]
    assert sorted(numbers) == list(range(25 * micro_batches))
    assert scheduler.totals.samples == 4 * 25 * micro_batches
    staleness = [u.number - run.versions[n] for u in run.updates for n, _ in u.weights]
    assert min(staleness) >= 0
    assert bound is None or max(staleness) <= bound
    histogram = [staleness.count(k) for k in range(max(staleness) + 1)]
    assert scheduler.staleness == Staleness(tuple(histogram))


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_without_staleness_each_update_is_one_step(micro_batches: int, seed: int) -> None:
    scheduler = SspScheduler(phase(10, micro_batches, 0, in_order=True))
    run = Simulated(scheduler, [1.0, 2.0, 5.0, 0.3], seed)
    run.run()
    for update in run.updates:
        expected = [micro_batches * update.number + i for i in range(micro_batches)]
        assert update.weights == tuple((number, 1 / micro_batches) for number in expected)


def throughput(bound: int | None, seconds: list[float], updates: int = 200) -> float:
    scheduler = SspScheduler(phase(updates, len(seconds), bound))
    return scheduler.phase.size / Simulated(scheduler, seconds).run()


def test_a_slow_worker_slows_the_others_only_where_the_bound_says_so() -> None:
    slow, even = [1.0, 1.0, 1.0, 4.0], [1.0] * 4
    assert throughput(None, slow) == pytest.approx(3.25, rel=0.03)
    assert throughput(16, slow) == pytest.approx(3.25, rel=0.03)
    assert throughput(4, slow) > 3.0
    assert throughput(0, slow) < 1.6  # a step waits for it, if it got a share of it
    assert throughput(None, even) == pytest.approx(4.0, rel=0.03)
    assert throughput(1, even) > 3.7


def test_a_stale_gradient_is_damped_if_requested() -> None:
    scheduler = SspScheduler(phase(3, 1, None, damped=True))
    for worker in range(3):
        assert scheduler.claim(worker, 0.0) == worker
        scheduler.begin(worker, worker, 0, 0.0)
    weights = [scheduler.done(worker, done(worker), 1.0)[0].weights for worker in range(3)]
    assert weights == [((0, 1.0),), ((1, 1 / 2),), ((2, 1 / 3),)]


@pytest.mark.parametrize("successor", [0, 1])
def test_claims_of_a_dead_worker_go_to_others_and_its_late_gradient_is_ignored(
    successor: int,
) -> None:
    """Also if the successor is a new process of the same worker."""
    scheduler = SspScheduler(phase(2, 2, 4))
    assert [scheduler.claim(0, 0.0), scheduler.claim(1, 0.0)] == [0, 1]
    scheduler.begin(0, 0, 0, 0.0)
    scheduler.begin(1, 1, 0, 0.0)
    scheduler.leave(0)
    assert scheduler.claim(successor, 1.0) == 4  # the first of four, once more
    assert scheduler.phase.index_of(4) == scheduler.phase.index_of(0)
    scheduler.begin(successor, 4, 0, 1.0)
    assert scheduler.done(0, done(0), 2.0) == []
    assert scheduler.totals.samples == 0
    assert scheduler.done(successor, done(4), 2.0) == []
    [update] = scheduler.done(1, done(1), 2.0)
    assert [number for number, _ in update.weights] == [4, 1]
    assert scheduler.done(1, done(1), 2.0) == []
    assert scheduler.totals.samples == 8


def test_an_update_that_waited_for_a_dead_worker_is_made() -> None:
    scheduler = SspScheduler(phase(3, 1, 1))
    for worker in (0, 1):
        scheduler.claim(worker, 0.0)
        scheduler.begin(worker, worker, 0, 0.0)
    assert len(scheduler.done(1, done(1), 1.0)) == 1
    scheduler.claim(1, 1.0)
    scheduler.begin(1, 2, 1, 1.0)
    assert scheduler.done(1, done(2), 2.0) == []
    [update] = scheduler.leave(0)
    assert [number for number, _ in update.weights] == [2]


def test_silence_is_measured_by_a_workers_own_micro_batches() -> None:
    scheduler = SspScheduler(phase(4, 2, None))
    for worker, seconds in ((0, 2.0), (1, 30.0)):
        number = scheduler.claim(worker, 0.0)
        assert number is not None
        scheduler.begin(worker, number, 0, 0.0)
        scheduler.done(worker, done(number), seconds)
        scheduler.claim(worker, seconds)
    assert scheduler.silent(21.0) == []
    assert scheduler.silent(23.0) == [0]
    assert scheduler.silent(23.0, waiting=[0]) == []
    assert scheduler.silent(331.0) == [0, 1]


def test_a_worker_that_has_done_nothing_yet_may_take_its_time() -> None:
    scheduler = SspScheduler(phase(4, 2, None))
    scheduler.claim(0, 0.0)
    assert scheduler.silent(100.0) == []
    assert scheduler.silent(121.0) == [0]


def test_micro_batches_have_their_steps_in_the_epoch() -> None:
    phase = EpochPhase("2.5", 2, 5, (0.1, 0.1), 3, None)
    assert [phase.index_of(number) for number in range(phase.size)] == [
        (5, 0), (5, 1), (5, 2), (6, 0), (6, 1), (6, 2),
    ]  # fmt: skip


def test_the_histogram_as_it_is_written_down() -> None:
    record = Staleness((6, 3, 1)).to_json()
    assert record == {"counts": [6, 3, 1], "mean": 0.5, "max": 2}
    assert Staleness().to_json() == {"counts": [], "mean": 0.0, "max": -1}
