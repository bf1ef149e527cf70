"""The length of a training that gets a time: from measured seconds of updates and of all else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from raytrain_opt.clock import monotonic_s
from raytrain_opt.execution import length
from raytrain_opt.execution.length import Pace, TrainingLength, epoch_span, lay_out, measure_pace
from raytrain_opt.optim.epoch_steps import EpochSpan, EpochSteps
from raytrain_opt.paths import RunPaths
from raytrain_opt.pools.commands import MainTrain, StateRef
from raytrain_opt.pools.interface import TrainingOutcome
from raytrain_opt.recording.recorder import EventLog, Recorder
from raytrain_opt.recording.records import EpochRecord
from raytrain_opt.results import EvalTotals, Split, TrainTotals
from raytrain_opt.search.policy import Decision, History
from tests.support.resolved import resolve_here
from tests.support.small_jobs import small_job
from tests.support.synthetic_runs import epoch_line

STEPS_S = (0.01, 0.04)  # of an update, by optimizer
OTHER_S, EVALUATE_S = 1.0, 0.2
STEPS = 100  # of an epoch


class FakeTraining:
    """A training whose clock shows the seconds that it says it took."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.optimizers: list[int] = []

    def train(self, command: MainTrain, **_: object) -> TrainingOutcome:
        steps = len(command.steps.lrs)
        duration_s = steps * STEPS_S[command.steps.optimizer]
        self.now_s += duration_s + OTHER_S
        self.optimizers.append(command.steps.optimizer)
        totals = TrainTotals(steps, steps, 0.0, 0, duration_s, 0.0)
        return TrainingOutcome(command.state, totals, {}, 1)

    def evaluate(self, state: StateRef, split: Split = "test") -> EvalTotals:
        return EvalTotals(1, {"loss": 0.0}, EVALUATE_S)


@pytest.mark.parametrize("optimizer", [0, 1])
def test_the_pace_is_that_of_the_updates_of_the_optimizer_and_all_else_is_apart(
    optimizer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = FakeTraining()
    monkeypatch.setattr(length, "monotonic_s", lambda: training.now_s)
    pace, steps = measure_pace(training, StateRef("0", None), optimizer, STEPS, 10.0)
    assert pace.step_s == pytest.approx(STEPS_S[optimizer])
    assert pace.other_s == pytest.approx(OTHER_S + EVALUATE_S)
    assert set(training.optimizers) == {optimizer}
    assert steps >= 2 * len(training.optimizers)


@pytest.fixture
def timed(tmp_path: Path) -> Iterator[TrainingLength]:
    """Yield the length of a training of 100 s, which has just begun."""
    schedule = {"policy": "schedule", "shape": "linear"}
    job = small_job(tmp_path, epochs=None, train_for=100.0, learning_rate=schedule)
    recorder = Recorder(RunPaths.create(str(tmp_path), "run"))
    event_log = EventLog(recorder, lambda _: None, monotonic_s())
    yield TrainingLength(replace(resolve_here(job), steps=EpochSteps(STEPS)), event_log)
    recorder.close()


def test_the_optimizer_that_a_round_chose_is_measured(timed: TrainingLength) -> None:
    measured = []

    def measure(optimizer: int, _limit_s: float) -> Pace:
        measured.append(optimizer)
        return Pace(STEPS_S[optimizer], OTHER_S)

    history = timed.estimate(History(), measure)
    undecided = Decision(1, 0.1, None, 0.1, "")
    history = timed.estimate(history.after_round(undecided), measure)
    history = timed.estimate(
        history.after_round(Decision(1, 0.1, None, 0.1, "", next_optimizer=1)), measure
    )
    timed.estimate(history, measure)
    assert measured == [0, 1]
    first, second, third = (span.total_steps for span in history.spans)
    assert first == pytest.approx(second, rel=0.01)
    assert third < first / 2


def test_a_resumed_run_measures_the_optimizer_that_was_chosen(timed: TrainingLength) -> None:
    measured = []

    def measure(optimizer: int, _limit_s: float) -> Pace:
        measured.append(optimizer)
        return Pace(0.01, OTHER_S)

    history = History().after_round(Decision(1, 0.1, None, 0.1, "", next_optimizer=1))
    timed.estimate(history, measure)
    assert measured == [1]


def test_what_an_epoch_takes_beside_its_updates_is_no_part_of_their_speed(
    timed: TrainingLength,
) -> None:
    pace = Pace(STEPS_S[0], OTHER_S)
    history = timed.estimate(History(), lambda *_: pace)
    steps_s = STEPS * pace.step_s
    timings_s = {"main_train_s": steps_s + OTHER_S, "main_compute_s": steps_s}
    line = epoch_line(1, samples=STEPS * 64, timings_s=timings_s, duration_s=steps_s + OTHER_S)
    timed.after_epoch(EpochRecord(**line))
    history = timed.estimate(history, lambda *_: pace)
    first, later = (span.total_steps for span in history.spans)
    # The epoch took no time of the clock, so it is trained in addition.
    assert later == pytest.approx(first + STEPS, rel=0.02)


def simulate(time_s: float, speed: Callable[[float], float]) -> tuple[float, list[EpochSpan]]:
    """Train until the time ends; an update takes `speed(seconds so far)` seconds."""
    now_s, step_s, done = 0.0, speed(0.0), list[EpochSpan]()
    while not done or not done[-1].is_last:
        steps = lay_out(time_s - now_s, Pace(step_s, 0.5), 50, 0.05 * time_s)
        done.append(epoch_span(len(done) + 1, steps, done))
        now_step_s = speed(now_s)
        now_s += done[-1].steps * now_step_s + 0.5
        step_s = (step_s + now_step_s) / 2
    return now_s, done


@pytest.mark.parametrize("time_s", [5.0, 20.0, 61.0, 1000.0])
def test_a_steady_training_ends_with_its_time(time_s: float) -> None:
    end_s, done = simulate(time_s, lambda _: 0.1)
    assert 0.94 * time_s <= end_s <= 1.01 * time_s
    assert done[-1].total_steps == sum(span.steps for span in done)


@pytest.mark.parametrize("factor", [0.5, 2.0, 4.0])
@pytest.mark.parametrize("time_s", [40.0, 300.0])
def test_a_change_of_speed_is_made_up_for(time_s: float, factor: float) -> None:
    end_s, done = simulate(time_s, lambda now_s: 0.1 * (factor if now_s > 0.4 * time_s else 1.0))
    assert 0.9 * time_s <= end_s <= 1.04 * time_s
    # The schedule is covered without gaps.
    assert (done[0].start, done[-1].stop) == (0.0, 1.0)
    assert all(a.stop == b.start for a, b in pairwise(done))


def test_no_time_left_is_one_update_and_a_later_estimate_of_an_epoch_counts() -> None:
    assert lay_out(-3.0, Pace(0.1, 0.5), 50, 0.0) == [1]
    first = epoch_span(1, [50] * 20, [])
    again = epoch_span(1, [50] * 10, [first])
    following = epoch_span(2, [50] * 9, [first, again])
    assert (again.start, again.stop, following.start) == (0.0, 0.1, 0.1)
    assert following.total_steps == 500
