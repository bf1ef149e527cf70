"""A schedule that is laid out in time: simulated trainings end within 10 % before their time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from raytrain_opt.optim.epoch_steps import EpochSpan
from raytrain_opt.search.time_budget import Pace, plan_epoch

FULL_STEPS = 50


def simulate(
    time_s: float,
    speed: Callable[[float], float],
    evaluate_s: float = 0.5,
    evaluate_every: int = 1,
) -> tuple[float, list[EpochSpan]]:
    """Train until the plan ends; an update takes `speed(seconds so far)` seconds."""
    now_s, pace = 0.0, Pace(speed(0.0), evaluate_s)
    done: list[EpochSpan] = []
    while not done or not done[-1].is_last:
        span = plan_epoch(
            len(done) + 1,
            time_s - now_s,
            pace,
            FULL_STEPS,
            evaluate_every=evaluate_every,
            shortest_s=0.05 * time_s,
            plans=done,
        )
        step_s = speed(now_s)
        now_s += span.steps * step_s
        if span.is_last or span.epoch % evaluate_every == 0:
            now_s += evaluate_s
        pace = pace.updated(Pace(step_s, evaluate_s))
        done.append(span)
    return now_s, done


@pytest.mark.parametrize("time_s", [5.0, 20.0, 61.0, 1000.0])
@pytest.mark.parametrize("evaluate_every", [1, 5])
def test_a_steady_training_ends_with_its_time(time_s: float, evaluate_every: int) -> None:
    end_s, done = simulate(time_s, lambda _: 0.1, evaluate_every=evaluate_every)
    assert 0.94 * time_s <= end_s <= 1.01 * time_s
    assert done[-1].total_steps == sum(span.steps for span in done)


@pytest.mark.parametrize("factor", [0.5, 2.0, 4.0])
@pytest.mark.parametrize("time_s", [40.0, 300.0])
def test_a_change_of_speed_is_made_up_for(time_s: float, factor: float) -> None:
    end_s, _ = simulate(time_s, lambda now_s: 0.1 * (factor if now_s > 0.4 * time_s else 1.0))
    assert 0.9 * time_s <= end_s <= 1.04 * time_s


def test_the_schedule_is_covered_without_gaps() -> None:
    _, done = simulate(200.0, lambda now_s: 0.1 if now_s < 90 else 0.17)
    assert (done[0].start, done[-1].stop) == (0.0, 1.0)
    assert all(a.stop == b.start for a, b in pairwise(done))
    fractions = [fraction for span in done for fraction in span.fractions()]
    assert fractions == sorted(fractions)
    assert {span.steps for span in done[:10]} == {FULL_STEPS}
    assert done[-1].steps < FULL_STEPS  # the last epochs get shorter


def test_no_time_left_is_one_update() -> None:
    span = plan_epoch(1, -3.0, Pace(0.1, 0.5), FULL_STEPS)
    assert (span.steps, span.total_steps, span.is_last) == (1, 1, True)


def test_a_later_plan_of_an_epoch_counts() -> None:
    first = plan_epoch(1, 100.0, Pace(0.1, 0.0), FULL_STEPS)
    again = plan_epoch(1, 50.0, Pace(0.1, 0.0), FULL_STEPS, plans=[first])
    following = plan_epoch(2, 45.0, Pace(0.1, 0.0), FULL_STEPS, plans=[first, again])
    assert (again.start, again.stop) == (0.0, pytest.approx(0.1, rel=0.02))
    assert following.start == again.stop
    assert following.total_steps == pytest.approx(500, rel=0.02)
