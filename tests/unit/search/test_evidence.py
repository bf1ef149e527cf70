"""When candidates have learned enough for a decision."""

from __future__ import annotations

import math

import pytest

from raytrain_opt.search.optimizer_race import class_entropy, doubt, is_better
from raytrain_opt.search.policy import Candidate, CandidateResult


def result(loss: float, error: float) -> CandidateResult:
    candidate = Candidate(0, 1.0, 0.1)
    return CandidateResult(candidate, "ok", 0.5, loss, loss, 8, 1.1, 0, 60, val_loss_error=error)


@pytest.mark.parametrize(
    ("untrained", "loss", "error", "learned"),
    [
        (0.693, 0.688, 0.007, False),  # two classes, 60 samples
        (0.693, 0.688, 0.001, False),  # it may know how frequent they are
        (0.693, 0.66, 0.02, False),
        (0.693, 0.65, 0.02, True),
        (4.62, 4.585, 0.005, False),  # 100 classes: 0.8 %
        (4.62, 4.4, 0.02, True),
        (2.3, 2.4, 0.0, False),
        (-1.0, -2.0, 0.1, True),  # a likelihood
        (-1.0, -1.005, 0.0, False),
        (1.0, float("nan"), 0.1, False),
        (1.0, 0.5, float("inf"), False),
        (float("inf"), 0.5, 0.1, False),
    ],
)
def test_the_fall_of_the_loss_must_exceed_its_noise(
    untrained: float, loss: float, error: float, *, learned: bool
) -> None:
    assert (doubt(result(loss, error), untrained) < 1) is learned


@pytest.mark.parametrize(("loss", "error", "better"), [(1.9, 0.05, True), (1.9, 0.2, False)])
def test_another_optimizer_is_better_by_more_than_the_standard_error(
    loss: float, error: float, *, better: bool
) -> None:
    assert is_better(result(loss, error), result(2.0, 0.0)) is better


@pytest.mark.parametrize(
    ("counts", "smoothing", "loss"),
    [
        ((50, 50), 0.0, math.log(2)),
        ((90, 10), 0.0, 0.325),
        ((90, 10, 0), 0.0, 0.325),
        ((90, 10), 0.2, 0.472),  # of (0.82, 0.18)
    ],
)
def test_a_guess_by_class_loses_the_entropy_of_the_classes(
    counts: tuple[int, ...], smoothing: float, loss: float
) -> None:
    assert class_entropy(counts, smoothing) == pytest.approx(loss, abs=1e-3)
