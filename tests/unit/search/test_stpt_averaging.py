"""Whose states are averaged after a round."""

from __future__ import annotations

import math
from typing import Any

import pytest

from raytrain_opt.config.learning_rate import StptPolicy
from raytrain_opt.optim.epoch_steps import EpochSteps
from raytrain_opt.search.policy import Candidate, CandidateResult, Decision, History, TryCandidates
from raytrain_opt.search.stpt import Stpt

NAN = math.nan


def scored(candidate: Candidate, accuracy: float) -> CandidateResult:
    status = "diverged" if math.isnan(accuracy) else "ok"
    return CandidateResult(candidate, status, accuracy, 1 - accuracy, 1.0, 8, 1.0, 0.1, 0)


def published(accuracies: list[float], **section: Any) -> Decision:
    """Return the decision over candidates of 1, 2, 3, ... times the base rate."""
    multipliers = [float(i + 1) for i in range(len(accuracies))]
    policy = Stpt(
        StptPolicy(policy="stpt", candidates=multipliers, **section),
        epochs=2,
        steps=EpochSteps(10),
    )
    action = policy.next(1, History())
    assert isinstance(action, TryCandidates)
    pairs = zip(action.candidates, accuracies, strict=True)
    return policy.decide(action, [scored(*pair) for pair in pairs], History())


@pytest.mark.parametrize(
    ("section", "accuracies", "averaged"),
    [
        ({}, [0.1, 0.3, 0.2], []),
        ({"merge": "best"}, [0.1, 0.3, 0.2], []),
        ({"merge": "average"}, [0.1, 0.3, 0.2], [1, 2, 0]),
        ({"merge": "average"}, [0.1, 0.3, NAN], [1, 0]),
        ({"merge": "average"}, [NAN, 0.3, NAN], []),
        ({"merge": "top_k_average", "top_k": 2}, [0.1, 0.3, 0.2], [1, 2]),
        ({"merge": "top_k_average"}, [0.1, 0.3, 0.2, 0.4], [3, 1, 2]),
        ({"merge": "top_k_average", "top_k": 9}, [0.1, 0.3, 0.2], [1, 2, 0]),
    ],
)
def test_the_winner_is_first_then_the_others_by_their_scores(
    section: dict[str, Any], accuracies: list[float], averaged: list[int]
) -> None:
    decision = published(accuracies, **section)
    assert [result.candidate.index for result in decision.averaged] == averaged
    assert decision.winner is not None
    assert decision.next_base_lr == decision.winner.candidate.lr


def test_nothing_is_averaged_when_all_diverged() -> None:
    decision = published([NAN, NAN], merge="average")
    assert (decision.winner, decision.averaged) == (None, ())
