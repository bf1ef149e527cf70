"""Staleness never exceeds its bound, every micro-batch counts once, nobody waits in vain."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_opt.async_training.scheduler import (
    EpochPhase,
    MicroBatchDone,
    SspScheduler,
    epoch_phase,
)
from raytrain_opt.pools.commands import MainTrain, StateRef
from raytrain_opt.results import Steps

BOUNDS = [0, 1, 2, 4, 16, None]


def phase(steps: int, micro_batches: int, bound: int | None) -> EpochPhase:
    return EpochPhase("1.0", 1, Steps(0, (0.1,) * steps), micro_batches, bound)


def done(number: int) -> MicroBatchDone:
    return MicroBatchDone(number, loss_sum=2.0, samples=4, skipped=1)


class Simulated:
    """Workers that take `seconds[w]` for a micro-batch, on a simulated clock.

    Each reads the weights before it asks whether it may begin, and again if they are too old.
    """

    def __init__(self, scheduler: SspScheduler, seconds: list[float], seed: int = 0) -> None:
        self.scheduler, self.seconds, self.now_s = scheduler, seconds, 0.0
        self.random = random.Random(seed)
        self.staleness: list[int] = []
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
            staleness = self.scheduler.version - self.versions[number]
            self.staleness.append(staleness)
            result = replace(done(number), staleness=staleness)
            self.scheduler.done(worker, result)
            for other in [worker, *self._blocked]:
                self._blocked = [w for w in self._blocked if w != other]
                self._ask(other, reads_early)
        return self.now_s

    def _ask(self, worker: int, reads_early: bool) -> None:
        number = self._claimed.get(worker)
        if number is None:
            number = self.scheduler.claim(worker)
        if number is None:
            return
        self._claimed[worker] = number
        if not self.scheduler.may_begin():
            self._blocked.append(worker)
            return
        version = self.scheduler.version
        if reads_early:
            version = max(0, version - self.random.randrange(3))
        if not self.scheduler.may_begin(version):
            version = self.scheduler.version
        self.scheduler.begin(number, version)
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
    size = 25 * micro_batches
    assert run.versions.keys() == set(range(size))
    assert scheduler.totals.samples == 4 * size
    assert len(run.staleness) == size
    assert min(run.staleness) >= 0
    assert bound is None or max(run.staleness) <= bound
    assert scheduler.staleness == Counter(run.staleness)


def throughput(bound: int | None, seconds: list[float], updates: int = 200) -> float:
    scheduler = SspScheduler(phase(updates, len(seconds), bound))
    return scheduler.phase.size / Simulated(scheduler, seconds).run()


def test_a_slow_worker_slows_the_others_only_where_the_bound_says_so() -> None:
    slow, even = [1.0, 1.0, 1.0, 4.0], [1.0] * 4
    assert throughput(None, slow) == pytest.approx(3.25, rel=0.03)
    assert throughput(16, slow) == pytest.approx(3.25, rel=0.03)
    assert throughput(4, slow) < 2.0
    assert throughput(0, slow) < 1.1  # one after the other
    assert throughput(None, even) == pytest.approx(4.0, rel=0.03)
    assert throughput(6, even) > 3.7


@pytest.mark.parametrize("successor", [0, 1])
def test_claims_of_a_dead_worker_go_to_others(successor: int) -> None:
    """Also if the successor is a new process of the same worker."""
    scheduler = SspScheduler(phase(1, 2, 4))
    assert [scheduler.claim(0), scheduler.claim(1)] == [0, 1]
    scheduler.begin(0, 0)
    scheduler.begin(1, 0)
    scheduler.leave(0)
    assert scheduler.claim(successor) == 0
    scheduler.done(0, done(0))  # late, and its successor has not begun
    assert scheduler.totals.samples == 0
    scheduler.begin(0, 0)
    for worker, number in ((successor, 0), (1, 1), (1, 1)):
        scheduler.done(worker, done(number))
    assert (scheduler.totals.samples, scheduler.finished) == (8, True)


def test_who_waited_for_a_dead_worker_may_begin() -> None:
    scheduler = SspScheduler(phase(3, 1, 1))
    for worker in (0, 1):
        scheduler.claim(worker)
        scheduler.begin(worker, 0)
    scheduler.done(1, done(1))
    scheduler.claim(1)
    assert not scheduler.may_begin()
    scheduler.leave(0)
    assert scheduler.may_begin()


def test_micro_batches_have_their_steps_in_the_epoch() -> None:
    phase = EpochPhase("2.5", 2, Steps(5, (0.1, 0.1)), 3, None)
    assert [phase.index_of(number) for number in range(phase.size)] == [
        (5, 0), (5, 1), (5, 2), (6, 0), (6, 1), (6, 2),
    ]  # fmt: skip


@pytest.mark.parametrize(("claimed", "end"), [(0, 3), (1, 3), (3, 3), (4, 6), (9, 9)])
def test_a_phase_that_ends_early_ends_with_the_step_that_has_begun(claimed: int, end: int) -> None:
    """Also where a worker leaves afterwards: others compute what it had claimed."""
    scheduler = SspScheduler(phase(3, 3, None))
    for _ in range(claimed):
        scheduler.claim(0)
    scheduler.end_early()
    scheduler.leave(0)
    scheduler.end_early()
    numbers = []
    while (number := scheduler.claim(1)) is not None:
        assert not scheduler.finished
        scheduler.begin(number, scheduler.version)
        scheduler.done(1, done(number))
        numbers.append(number)
    assert scheduler.finished
    assert sorted(numbers) == [*range(end)]


def test_each_attempt_of_a_phase_has_an_id_of_its_own() -> None:
    """A gradient of a worker that died in the attempt before must find no phase."""
    section = SimpleNamespace(staleness_bound=4)
    shares = {"worker_count": 2, "async_updates": 1}
    settings: Any = SimpleNamespace(batch_ramp=(), parallel=section, **shares)
    command = MainTrain(StateRef("start", None), 1, Steps(0, (0.1,) * 3))
    ids = {epoch_phase(settings, replace(command, attempt=attempt)).id for attempt in range(3)}
    assert len(ids) == 3
