"""Schedules compared with written-out tables and with torch's, and their laws."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from raytrain_opt.config.learning_rate import SchedulePolicy
from raytrain_opt.errors import JobError
from raytrain_opt.optim.schedules import (
    ArcCotangent,
    Constant,
    Cosine,
    MultiStep,
    Polynomial,
    Schedule,
    Warmup,
    build_schedule,
)


def rates(schedule: Schedule, steps: int) -> list[float]:
    return [schedule.lr(step) for step in range(steps)]


R = math.sqrt(0.5)
R3 = math.sqrt(3)


@pytest.mark.parametrize(
    ("schedule", "table"),
    [
        (Constant(0.3), [0.3, 0.3, 0.3]),
        (MultiStep(1.0, 0.1, (1, 3)), [1.0, 0.1, 0.1, 0.01, 0.01]),
        (Polynomial(0.4, 0.0, steps=4), [0.4, 0.3, 0.2, 0.1, 0.0, 0.0]),
        (Polynomial(0.4, 0.2, steps=2), [0.4, 0.3, 0.2, 0.2]),
        (Polynomial(1.6, 0.0, steps=4, power=2.0), [1.6, 0.9, 0.4, 0.1, 0.0, 0.0]),
        (Polynomial(1.7, 0.1, steps=4, power=2.0), [1.7, 1.0, 0.5, 0.2, 0.1]),
        (Cosine(2.0, 0.0, steps=4), [2.0, 1 + R, 1.0, 1 - R, 0.0, 0.0]),
        (Cosine(2.0, 1.0, steps=2), [2.0, 1.5, 1.0, 1.0]),
        # arccot 1 = pi/4, arccot 2 = 0.46364761, arccot 8 = 0.12435499; arccot -x = pi - arccot x
        (
            ArcCotangent(0.8, half=2, steepness=1.0),
            [0.6819331, 0.6, 0.4, 0.2, 0.1180669, 0.08193311],
        ),
        (ArcCotangent(math.pi, half=1, steepness=2.0), [2.6779450, 1.5707963, 0.46364761]),
        (ArcCotangent(1.0, half=1.5, steepness=2.0), [0.8975836, 0.75, 0.25, 0.1024164]),
        (
            Warmup(0.1, 0.8, 2, "linear", ArcCotangent(0.8, 3, 1.0), origin=0),
            [0.1, 0.45, 0.6, 0.4, 0.2],
        ),
        (
            Warmup(0.1, 0.5, 4, "linear", Polynomial(0.5, 0.0, 2), origin=4),
            [0.1, 0.2, 0.3, 0.4, 0.5, 0.25, 0.0],
        ),
        (
            Warmup(0.1, 0.5, 2, "constant", MultiStep(0.5, 0.1, (3,)), origin=0),
            [0.1, 0.1, 0.5, 0.05],
        ),
    ],
)
def test_schedule_follows_its_table(schedule: Schedule, table: list[float]) -> None:
    assert rates(schedule, len(table)) == pytest.approx(table)


@pytest.mark.parametrize(
    ("schedule", "table"),
    [
        (Constant(0.3), {0.5: 0.3}),
        (MultiStep(1.0, 0.1, (1, 3)), {0.99: 1.0, 1.5: 0.1, 2.99: 0.1, 3.0: 0.01}),
        (Polynomial(0.4, 0.0, steps=4), {0.5: 0.35, 2.25: 0.175, 4.5: 0.0}),
        (Polynomial(1.6, 0.0, steps=4, power=2.0), {0.5: 1.225, 3.5: 0.025, 4.5: 0.0}),
        (Cosine(2.0, 0.0, steps=3), {0.5: 1 + R3 / 2, 1.5: 1.0, 2.5: 1 - R3 / 2, 3.5: 0.0}),
        (ArcCotangent(0.8, half=2, steepness=2.0), {1.5: 0.6, 2.0: 0.4, 2.5: 0.2}),
        (
            Warmup(0.1, 0.5, 4, "linear", Polynomial(0.5, 0.0, 2), origin=4),
            {0.5: 0.15, 3.75: 0.475, 4.5: 0.375},
        ),
        (Warmup(0.1, 0.5, 2, "constant", Constant(0.5), origin=2), {1.99: 0.1, 2.01: 0.5}),
    ],
)
def test_schedule_is_defined_between_two_steps(
    schedule: Schedule, table: dict[float, float]
) -> None:
    assert {step: schedule.lr(step) for step in table} == pytest.approx(table)


@pytest.mark.parametrize(("half", "steepness"), [(40, 0.2), (25.5, 0.05), (0, 0.1)])
def test_arc_cotangent_is_half_at_e_and_always_falls(half: float, steepness: float) -> None:
    schedule = ArcCotangent(0.8, half, steepness)
    assert schedule.lr(half) == pytest.approx(0.4)
    for x in (0.25, 1, 7, 30):
        assert schedule.lr(half - x) + schedule.lr(half + x) == pytest.approx(0.8)
    lrs = rates(schedule, 81)
    assert all(before > after for before, after in pairwise(lrs))
    assert max(lrs) < 0.8
    assert min(lrs) > 0


def test_arc_cotangent_keeps_its_precision_far_from_e() -> None:
    schedule = ArcCotangent(math.pi, half=0, steepness=1.0)
    assert schedule.lr(1e12) == pytest.approx(1e-12, rel=1e-12)
    assert schedule.lr(-1e12) == pytest.approx(math.pi)


SHAPES: dict[str, dict[str, Any]] = {
    "constant": {},
    "multistep": {"milestones": [2, 4]},
    "linear": {"final": 0.01},
    "polynomial": {"final": 0.01, "power": 3.0},
    "cosine": {"final": 0.01},
    "arc_cotangent": {"half_epoch": 4.0, "steepness": 1.5},
}


def policy(shape: str, warmup_epochs: int = 0, kind: str = "linear") -> SchedulePolicy:
    warmup = {"epochs": warmup_epochs, "lr": 0.02, "shape": kind}
    values = {"policy": "schedule", "initial": 0.2, "shape": shape, "warmup": warmup}
    settings = dict(SHAPES[shape])
    if warmup_epochs >= settings.get("half_epoch", math.inf):
        del settings["half_epoch"]
    return SchedulePolicy.model_validate({**values, **settings})


@pytest.mark.parametrize("warmup_epochs", [0, 2])
@pytest.mark.parametrize("shape", ["linear", "polynomial", "cosine"])
def test_decay_covers_the_steps_after_the_warmup(shape: str, warmup_epochs: int) -> None:
    schedule = build_schedule(policy(shape, warmup_epochs), steps=30, steps_per_epoch=5)
    start, end = warmup_epochs * 5, 6 * 5
    lrs = rates(schedule, end + 2)
    assert lrs[start] == pytest.approx(0.2)
    assert lrs[end - 1] > 0.01
    assert lrs[end:] == pytest.approx([0.01, 0.01])
    falls = [before - after for before, after in pairwise(lrs[start : end + 1])]
    assert min(falls) > 0


@pytest.mark.parametrize("warmup_epochs", [0, 1])
def test_drops_count_epochs_from_the_start_of_training(warmup_epochs: int) -> None:
    schedule = build_schedule(policy("multistep", warmup_epochs), steps=30, steps_per_epoch=5)
    expected = [0.2] * 10 + [0.02] * 10 + [0.002] * 10
    first = warmup_epochs * 5
    assert rates(schedule, 30)[first:] == pytest.approx(expected[first:])


@pytest.mark.parametrize(
    ("warmup_epochs", "half_epoch", "half"),
    [(0, None, 15), (2, None, 20), (1, None, 17.5), (0, 4.0, 20), (2, 4.0, 20), (2, 4.5, 22.5)],
)
def test_arc_cotangent_is_half_at_its_epoch_from_the_start_of_training(
    warmup_epochs: int, half_epoch: float | None, half: float
) -> None:
    section = policy("arc_cotangent", warmup_epochs).model_copy(update={"half_epoch": half_epoch})
    schedule = build_schedule(section, steps=30, steps_per_epoch=5)
    assert schedule.lr(half) == pytest.approx(0.1)
    # k = 1.5 an epoch: two thirds of an epoch away f is 1, and arccot 1 is pi / 4.
    distance = 5 / 1.5
    assert schedule.lr(half - distance) == pytest.approx(0.15)
    assert schedule.lr(half + distance) == pytest.approx(0.05)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_follows_either_warmup(shape: str) -> None:
    without_warmup = build_schedule(policy(shape), steps=30, steps_per_epoch=5)
    for kind, start in (("linear", [0.02, 0.038, 0.056]), ("constant", [0.02] * 3)):
        lrs = rates(build_schedule(policy(shape, 2, kind), steps=30, steps_per_epoch=5), 30)
        assert lrs[:3] == pytest.approx(start)
        assert lrs[9] == pytest.approx(0.182 if kind == "linear" else 0.02)
        if shape in ("multistep", "arc_cotangent"):
            assert lrs[10:] == rates(without_warmup, 30)[10:]


def test_a_warmup_in_updates_is_one_of_epochs_where_both_are_equally_long() -> None:
    policies = [
        SchedulePolicy.model_validate({"policy": "schedule", "warmup": {name: length}})
        for name, length in (("epochs", 2), ("steps", 20), ("steps", 15))
    ]
    epochs, steps, shorter = (
        build_schedule(policy, steps=50, steps_per_epoch=10) for policy in policies
    )
    assert [epochs.lr(step) for step in range(50)] == [steps.lr(step) for step in range(50)]
    assert shorter.lr(15) == 0.1 > epochs.lr(15)
    with pytest.raises(JobError, match="warmup.steps: is longer than .* 10 updates"):
        build_schedule(policies[2], steps=10, steps_per_epoch=10)


def test_a_warmup_starts_at_a_twentieth_of_the_rate_by_default() -> None:
    section = SchedulePolicy.model_validate({"policy": "schedule", "warmup": {"epochs": 1}})
    assert build_schedule(section, steps=6, steps_per_epoch=2).lr(0) == pytest.approx(0.005)
