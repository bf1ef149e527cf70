"""Whose states are averaged after a round."""

from __future__ import annotations

import math
from typing import Any

import pytest

from raytrain_opt.config.learning_rate import HorizonPolicy, StptPolicy
from raytrain_opt.optim.batch_ramp import EpochSteps
from raytrain_opt.search.policy import Candidate, CandidateResult, Round
from raytrain_opt.search.stpt import Stpt
from raytrain_opt.search.stpt_horizon import HorizonStpt

NAN = math.nan


def scored(candidate: Candidate, accuracy: float) -> CandidateResult:
    status = "diverged" if math.isnan(accuracy) else "ok"
    blocks = (1 - accuracy, 1.1 - accuracy)
    return CandidateResult(
        candidate, status, accuracy, 1 - accuracy, 1.0, 8, 1.0, 0.1, 0, val_losses=blocks
    )


def published(accuracies: list[float], **section: Any) -> Round:
    """The decision over candidates of 1, 2, 3, ... times the base rate."""
    multipliers = [float(i + 1) for i in range(len(accuracies))]
    given = StptPolicy(policy="stpt", candidates=multipliers, **section)
    policy = Stpt(given, epochs=2, steps=EpochSteps(10))
    plan = policy.plan(1, ())
    pairs = zip(plan.candidates, accuracies, strict=True)
    return policy.choose(plan, [scored(*pair) for pair in pairs])


@pytest.mark.parametrize(
    ("section", "accuracies", "averaged"),
    [
        ({}, [0.1, 0.3, 0.2], []),
        ({"combine": "best"}, [0.1, 0.3, 0.2], []),
        ({"combine": "average"}, [0.1, 0.3, 0.2], [1, 2, 0]),
        ({"combine": "average"}, [0.1, 0.3, NAN], [1, 0]),
        ({"combine": "average"}, [NAN, 0.3, NAN], []),
        ({"combine": "top_k_average", "top_k": 2}, [0.1, 0.3, 0.2], [1, 2]),
        ({"combine": "top_k_average"}, [0.1, 0.3, 0.2, 0.4], [3, 1, 2]),
        ({"combine": "top_k_average", "top_k": 9}, [0.1, 0.3, 0.2], [1, 2, 0]),
    ],
)
def test_the_winner_is_first_then_the_others_by_their_scores(
    section: dict[str, Any], accuracies: list[float], averaged: list[int]
) -> None:
    choice = published(accuracies, **section)
    assert [member.candidate.index for member in choice.averaged] == averaged
    assert all(member.val_losses == () for member in choice.averaged)
    assert choice.winner is not None
    assert choice.next_base_lr == choice.winner.candidate.lr


def test_nobody_is_averaged_where_all_diverged() -> None:
    choice = published([NAN, NAN], combine="average")
    assert (choice.winner, choice.averaged) == (None, ())


def test_later_rounds_of_the_horizon_policy_average_what_they_keep() -> None:
    given = HorizonPolicy(policy="stpt_horizon", combine="average")
    policy = HorizonStpt(given, epochs=96, steps=EpochSteps(125))
    base = Round(1, 0.1, (), scored(Candidate(0, 1.0, 0.1), 0.5), 0.1, "")
    plan = policy.plan(13, (base,))
    assert plan.kept_steps > 0
    choice = policy.choose(plan, [scored(c, 0.1 * c.index) for c in plan.candidates])
    assert sorted(member.candidate.index for member in choice.averaged) == [0, 1, 2]
    assert choice.winner is not None
    assert choice.averaged[0].candidate == choice.winner.candidate
