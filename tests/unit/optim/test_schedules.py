"""Schedules and scaling rules compared with written-out tables, and their laws."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest

from raytrain_opt.config.learning_rate import SchedulePolicy
from raytrain_opt.optim.schedules import lr_at, scale_lr

R = math.sqrt(0.5)
R3 = math.sqrt(3)


def policy(shape: str, initial: float, **settings: Any) -> SchedulePolicy:
    values = {"policy": "schedule", "shape": shape, "initial": initial}
    return SchedulePolicy.model_validate({**values, **settings})


def rates(section: SchedulePolicy, count: int, steps: int = 4, per_epoch: int = 1) -> list[float]:
    return [lr_at(section, t, steps=steps, steps_per_epoch=per_epoch) for t in range(count)]


RISE = {"epochs": 4, "lr": 0.1}
DROPS = {"milestones": [1, 3], "gamma": 0.1}


@pytest.mark.parametrize(
    ("shape", "initial", "settings", "steps", "table"),
    [
        ("constant", 0.3, {}, 4, [0.3, 0.3, 0.3]),
        ("plateau", 0.3, {}, 4, [0.3, 0.3, 0.3]),
        ("multistep", 1.0, DROPS, 4, [1.0, 0.1, 0.1, 0.01, 0.01]),
        ("linear", 0.4, {}, 4, [0.4, 0.3, 0.2, 0.1, 0.0, 0.0]),
        ("linear", 0.4, {"final": 0.2}, 2, [0.4, 0.3, 0.2, 0.2]),
        ("polynomial", 1.6, {}, 4, [1.6, 0.9, 0.4, 0.1, 0.0, 0.0]),
        ("polynomial", 1.7, {"final": 0.1}, 4, [1.7, 1.0, 0.5, 0.2, 0.1]),
        ("cosine", 2.0, {}, 4, [2.0, 1 + R, 1.0, 1 - R, 0.0, 0.0]),
        ("cosine", 2.0, {"final": 1.0}, 2, [2.0, 1.5, 1.0, 1.0]),
        # arccot 1 = pi/4, arccot 2 = 0.46364761, arccot 8 = 0.12435499; arccot -x = pi - arccot x
        (
            "arc_cotangent",
            0.8,
            {"half_epoch": 2, "steepness": 1},
            9,
            [0.6819331, 0.6, 0.4, 0.2, 0.1180669, 0.08193311],
        ),
        (
            "arc_cotangent",
            math.pi,
            {"half_epoch": 1, "steepness": 2},
            9,
            [2.6779450, 1.5707963, 0.46364761],
        ),
        ("arc_cotangent", 1.0, {"steepness": 2}, 3, [0.8975836, 0.75, 0.25, 0.1024164]),
        (
            "arc_cotangent",
            0.8,
            {"half_epoch": 3, "steepness": 1, "warmup": {"epochs": 2, "lr": 0.1}},
            9,
            [0.1, 0.45, 0.6, 0.4, 0.2],
        ),
        ("linear", 0.5, {"warmup": RISE}, 6, [0.1, 0.2, 0.3, 0.4, 0.5, 0.25, 0.0]),
        ("multistep", 0.5, {**DROPS, "warmup": RISE}, 6, [0.1, 0.2, 0.3, 0.4, 0.005]),
        (
            "constant",
            0.5,
            {"warmup": {"steps": 2, "lr": 0.1, "shape": "constant"}},
            4,
            [0.1, 0.1, 0.5, 0.5],
        ),
    ],
)
def test_schedule_follows_its_table(
    shape: str, initial: float, settings: dict[str, Any], steps: int, table: list[float]
) -> None:
    assert rates(policy(shape, initial, **settings), len(table), steps) == pytest.approx(table)


@pytest.mark.parametrize(
    ("shape", "initial", "settings", "steps", "table"),
    [
        ("multistep", 1.0, DROPS, 4, {0.99: 1.0, 1.5: 0.1, 2.99: 0.1, 3.0: 0.01}),
        ("linear", 0.4, {}, 4, {0.5: 0.35, 2.25: 0.175, 4.5: 0.0}),
        ("cosine", 2.0, {}, 3, {0.5: 1 + R3 / 2, 1.5: 1.0, 2.5: 1 - R3 / 2, 3.5: 0.0}),
        ("arc_cotangent", 0.8, {"steepness": 2}, 4, {1.5: 0.6, 2.0: 0.4, 2.5: 0.2}),
        ("linear", 0.5, {"warmup": RISE}, 6, {0.5: 0.15, 3.75: 0.475, 4.5: 0.375}),
    ],
)
def test_schedule_is_defined_between_two_steps(
    shape: str, initial: float, settings: dict[str, Any], steps: int, table: dict[float, float]
) -> None:
    section = policy(shape, initial, **settings)
    found = {t: lr_at(section, t, steps=steps, steps_per_epoch=1) for t in table}
    assert found == pytest.approx(table)


@pytest.mark.parametrize(("half", "steepness"), [(40, 0.2), (25.5, 0.05), (0.5, 0.1)])
def test_arc_cotangent_is_half_at_e_and_always_falls(half: float, steepness: float) -> None:
    section = policy("arc_cotangent", 0.8, half_epoch=half, steepness=steepness)

    def lr(step: float) -> float:
        return lr_at(section, step, steps=90, steps_per_epoch=1)

    assert lr(half) == pytest.approx(0.4)
    for x in (0.25, 0.5):
        assert lr(half - x) + lr(half + x) == pytest.approx(0.8)
    lrs = rates(section, 81, 90)
    assert all(before > after for before, after in pairwise(lrs))
    assert max(lrs) < 0.8
    assert min(lrs) > 0
    assert lr(1e12) == pytest.approx(0.8 / math.pi / steepness * 1e-12, rel=1e-9)


SHAPES: dict[str, dict[str, Any]] = {
    "constant": {},
    "multistep": {"milestones": [2, 4]},
    "linear": {"final": 0.01},
    "polynomial": {"final": 0.01, "power": 3.0},
    "cosine": {"final": 0.01},
    "arc_cotangent": {"half_epoch": 4.0, "steepness": 1.5},
}


@pytest.mark.parametrize("warmup_epochs", [0, 2])
@pytest.mark.parametrize("shape", ["linear", "polynomial", "cosine"])
def test_decay_covers_the_steps_after_the_warmup(shape: str, warmup_epochs: int) -> None:
    section = policy(shape, 0.2, **SHAPES[shape], warmup={"epochs": warmup_epochs})
    start, end = warmup_epochs * 5, 6 * 5
    lrs = rates(section, end + 2, steps=30, per_epoch=5)
    assert lrs[start] == pytest.approx(0.2)
    assert lrs[end - 1] > 0.01
    assert lrs[end:] == pytest.approx([0.01, 0.01])
    falls = [before - after for before, after in pairwise(lrs[start : end + 1])]
    assert min(falls) > 0


@pytest.mark.parametrize(
    ("warmup_epochs", "half_epoch", "half"),
    [(0, None, 15), (2, None, 20), (1, None, 17.5), (0, 4.0, 20), (2, 4.0, 20), (2, 4.5, 22.5)],
)
def test_arc_cotangent_is_half_at_its_epoch_from_the_start_of_training(
    warmup_epochs: int, half_epoch: float | None, half: float
) -> None:
    settings = {"steepness": 1.5, "half_epoch": half_epoch, "warmup": {"epochs": warmup_epochs}}
    section = policy("arc_cotangent", 0.2, **settings)
    # k = 1.5 an epoch: two thirds of an epoch away f is 1, and arccot 1 is pi / 4.
    for step, lr in ((half, 0.1), (half - 5 / 1.5, 0.15), (half + 5 / 1.5, 0.05)):
        assert lr_at(section, step, steps=30, steps_per_epoch=5) == pytest.approx(lr)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_follows_either_warmup(shape: str) -> None:
    without_warmup = rates(policy(shape, 0.2, **SHAPES[shape]), 30, steps=30, per_epoch=5)
    for kind, start in (("linear", [0.02, 0.038, 0.056]), ("constant", [0.02] * 3)):
        warmup = {"epochs": 2, "lr": 0.02, "shape": kind}
        section = policy(shape, 0.2, **SHAPES[shape], warmup=warmup)
        lrs = rates(section, 30, steps=30, per_epoch=5)
        assert lrs[:3] == pytest.approx(start)
        assert lrs[9] == pytest.approx(0.182 if kind == "linear" else 0.02)
        if shape in ("multistep", "arc_cotangent"):
            assert lrs[10:] == without_warmup[10:]


def test_a_warmup_in_updates_is_one_of_epochs_where_both_are_equally_long() -> None:
    epochs, steps, shorter = (
        rates(policy("cosine", 0.1, warmup={name: length}), 50, steps=50, per_epoch=10)
        for name, length in (("epochs", 2), ("steps", 20), ("steps", 15))
    )
    assert epochs == steps
    assert shorter[15] == 0.1 > epochs[15]
    assert epochs[0] == pytest.approx(0.005)  # a twentieth by default


def test_arc_cotangent_keeps_its_precision_far_from_e() -> None:
    section = policy("arc_cotangent", math.pi, half_epoch=1, steepness=1.0)
    assert lr_at(section, 1e12 + 1, steps=4, steps_per_epoch=1) == pytest.approx(1e-12, rel=1e-12)


@pytest.mark.parametrize(
    ("rule", "lr", "from_size", "to_size", "expected"),
    [
        ("linear", 0.1, 256, 8192, 3.2),  # Goyal et al.
        ("linear", 0.1, 256, 32768, 12.8),  # Akiba et al., who then train with half of it
        ("linear", 0.1, 256, 64, 0.025),
        ("sqrt", 0.01, 128, 512, 0.02),
        ("sqrt", 0.4, 1024, 64, 0.1),
        ("none", 0.3, 256, 8192, 0.3),
    ],
)
def test_rate_for_another_batch(
    rule: Any, lr: float, from_size: int, to_size: int, expected: float
) -> None:
    assert scale_lr(rule, lr, from_size, to_size) == pytest.approx(expected, rel=1e-12)


def test_schedules_steps_and_scaling_do_not_import_torch() -> None:
    code = "import sys; from raytrain_opt.optim import epoch_steps, schedules; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
