"""STPT line by line against the published rule, and what we add where the paper is silent."""

from __future__ import annotations

import math
from typing import Any

import pytest

from raytrain_opt.config.learning_rate import StptPolicy, Warmup
from raytrain_opt.errors import DivergedError, JobError
from raytrain_opt.optim.epoch_steps import EpochSteps
from raytrain_opt.search.policy import (
    Candidate,
    CandidateResult,
    Decision,
    History,
    TrainEpoch,
    TryCandidates,
)
from raytrain_opt.search.stpt import Stpt

ALPHA_STUDY = (10.0, 5.0, 3.0, 1.5, 1.0, 0.9, 0.5, 0.4)
NARROW = (1.25, 1.17, 1.08, 1.00, 0.95, 0.90, 0.85, 0.80)
MIDDLE = (2.50, 2.00, 1.50, 1.00, 0.85, 0.70, 0.55, 0.40)
WIDE = (5.00, 3.67, 2.33, 1.00, 0.80, 0.60, 0.40, 0.20)


def stpt(epochs: int = 40, steps_per_epoch: int = 10, **section: Any) -> Stpt:
    validated = StptPolicy.model_validate({"policy": "stpt", **section})
    return Stpt(validated, epochs, EpochSteps(steps_per_epoch))


EMPTY = History()


def next_round(policy: Stpt, epoch: int = 40, history: History = EMPTY) -> TryCandidates:
    action = policy.next(epoch, history)
    assert isinstance(action, TryCandidates)
    return action


def epoch_without_round(policy: Stpt, epoch: int) -> TrainEpoch:
    action = policy.next(epoch, EMPTY)
    assert isinstance(action, TrainEpoch)
    return action


def result(candidate: Candidate, **outcome: Any) -> CandidateResult:
    values = {"status": "ok", "val_metric": 0.5, "val_loss": 1.0, "train_loss": 1.0, **outcome}
    return CandidateResult(candidate, samples=8, duration_s=1.5, slot=0, **values)


def decide(policy: Stpt, accuracies: list[float], action: TryCandidates | None = None) -> Decision:
    """Return the decision when the candidates reach these accuracies; NaN: diverged."""
    action = action or next_round(policy)
    results = [
        result(candidate, val_metric=accuracy, status="diverged" if math.isnan(accuracy) else "ok")
        for candidate, accuracy in zip(action.candidates, accuracies, strict=True)
    ]
    return policy.decide(action, results, EMPTY)


# The sets and the Mix schedule.


@pytest.mark.parametrize(
    ("candidates", "multipliers"),
    [
        ("alpha_study", ALPHA_STUDY),
        ("narrow", NARROW),
        ("middle", MIDDLE),
        ("wide", WIDE),
        ([2.0, 0.5], (2.0, 0.5)),
    ],
)
def test_a_named_set_is_used_in_every_epoch(
    candidates: Any, multipliers: tuple[float, ...]
) -> None:
    policy = stpt(candidates=candidates, initial=0.2)
    for epoch in (1, 20, 40):
        action = next_round(policy, epoch)
        assert tuple(c.multiplier for c in action.candidates) == multipliers
        assert [c.lr for c in action.candidates] == pytest.approx([0.2 * m for m in multipliers])
        assert [c.index for c in action.candidates] == list(range(len(multipliers)))


def set_name(policy: Stpt, epoch: int) -> str:
    action = policy.next(epoch, EMPTY)
    if isinstance(action, TrainEpoch):
        return "warm-up"
    names = {NARROW: "narrow", MIDDLE: "middle", WIDE: "wide"}
    return names[tuple(c.multiplier for c in action.candidates)]


@pytest.mark.parametrize(
    ("epochs", "last_warmup", "last_narrow", "last_middle"),
    [(40, 4, 19, 29), (8, 1, 4, 6), (10, 1, 5, 7), (16, 2, 8, 12), (90, 9, 43, 65)],
)
def test_mix_changes_sets_at_the_papers_epochs_scaled(
    epochs: int, last_warmup: int, last_narrow: int, last_middle: int
) -> None:
    policy = stpt(epochs, candidates="mix")
    expected = (
        ["warm-up"] * last_warmup
        + ["narrow"] * (last_narrow - last_warmup)
        + ["middle"] * (last_middle - last_narrow)
        + ["wide"] * (epochs - last_middle)
    )
    assert [set_name(policy, epoch) for epoch in range(1, epochs + 1)] == expected


# Alpha.


@pytest.mark.parametrize(
    ("alpha", "steps_per_epoch", "expected"),
    [
        (200, 2500, 200),
        (0.08, 2500, 200),
        (1, 10, 1),
        (1.0, 10, 10),
        (0.25, 10, 2),
        (0.01, 10, 1),
        (10, 10, 10),
    ],
)
def test_alpha_is_iterations_or_a_fraction_of_the_epoch(
    alpha: float, steps_per_epoch: int, expected: int
) -> None:
    policy = stpt(steps_per_epoch=steps_per_epoch, alpha=alpha)
    assert next_round(policy).pretrain_steps == expected


def test_alpha_longer_than_an_epoch_is_refused() -> None:
    with pytest.raises(JobError, match=r"learning_rate\.alpha.*which has 10 iterations.*11"):
        stpt(steps_per_epoch=10, alpha=11)


# Warm-up.


def test_warm_up_epochs_have_no_candidates_and_climb_to_the_initial_rate() -> None:
    warmup = {"epochs": 2, "lr": 0.1, "shape": "linear"}
    policy = stpt(steps_per_epoch=2, candidates="narrow", initial=0.5, warmup=warmup)
    first, second = (epoch_without_round(policy, epoch) for epoch in (1, 2))
    assert first.steps.lrs == pytest.approx((0.1, 0.2))
    assert second.steps.lrs == pytest.approx((0.3, 0.4))
    third = next_round(policy, 3)
    assert (third.base_lr, len(third.candidates)) == (0.5, 8)


@pytest.mark.parametrize(
    ("section", "epochs"),
    [
        ({"candidates": "mix"}, 4),
        ({"candidates": "narrow"}, 0),
        ({"candidates": [1.0, 0.5]}, 0),
        ({"candidates": "mix", "warmup": Warmup(epochs=0)}, 0),
        ({"candidates": "wide", "warmup": Warmup(epochs=3)}, 3),
    ],
)
def test_only_mix_has_a_warm_up_of_its_own(section: dict[str, Any], epochs: int) -> None:
    assert stpt(40, **section).warmup.epochs == epochs


def test_a_batch_ramp_within_the_warm_up_covers_it_in_larger_strides() -> None:
    warmup = Warmup(epochs=2, lr=0.1)
    policy = Stpt(
        StptPolicy(policy="stpt", initial=0.5, warmup=warmup), 40, EpochSteps(4, ((2, 2),))
    )
    lrs = [epoch_without_round(policy, epoch).steps.lrs for epoch in (1, 2)]
    assert lrs == [pytest.approx((0.1, 0.15, 0.2, 0.25)), pytest.approx((0.3, 0.4))]


# The winner.


def test_the_highest_score_wins_and_its_rate_is_the_next_base_rate() -> None:
    policy = stpt(candidates=[2.0, 1.0, 0.5], initial=0.4)
    decision = decide(policy, [0.6, 0.7, 0.8])
    assert decision.winner is not None
    assert decision.winner.candidate == Candidate(2, 0.5, 0.2)
    assert next_round(policy).score_of(decision.winner) == 0.8
    assert (decision.base_lr, decision.next_base_lr) == (0.4, 0.2)
    assert "validation accuracy" in decision.reason


def test_multipliers_accumulate_over_the_epochs() -> None:
    policy = stpt(candidates=[2.0, 0.5], initial=0.1)
    history = EMPTY
    for epoch, accuracies in enumerate(([0.9, 0.1], [0.9, 0.1], [0.1, 0.9]), start=1):
        action = next_round(policy, epoch, history)
        history = history.after_round(decide(policy, accuracies, action))
    assert [decision.base_lr for decision in history.decisions] == pytest.approx([0.1, 0.2, 0.4])
    assert next_round(policy, 4, history).base_lr == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("candidates", "accuracies", "winner"),
    [
        ([5.0, 0.8, 1.5], [0.7, 0.7, 0.7], 0.8),
        ([5.0, 1.0, 0.9], [0.7, 0.7, 0.7], 1.0),
        ([5.0, 1.0, 3.0], [0.7, 0.6, 0.7], 3.0),
        ([1.5, 0.5], [0.7, 0.7], 1.5),  # as close: the first
        ([0.5, 1.5], [0.7, 0.7], 0.5),
    ],
)
def test_a_tie_goes_to_the_multiplier_closest_to_one(
    candidates: list[float], accuracies: list[float], winner: float
) -> None:
    decision = decide(stpt(candidates=candidates), accuracies)
    assert decision.winner is not None
    assert decision.winner.candidate.multiplier == winner
    assert "tied, multiplier closest to 1.0" in decision.reason


def test_one_candidate_is_no_search_and_its_multiplier_accumulates() -> None:
    policy = stpt(candidates=[0.5], initial=0.8, warmup={"epochs": 1})
    epochs = [epoch_without_round(policy, epoch) for epoch in (2, 3)]
    assert [set(action.steps.lrs) for action in epochs] == [{0.4}, {0.2}]
    assert {len(action.steps.lrs) for action in epochs} == {policy.steps.first}


# Divergence.


def test_a_diverged_candidate_never_wins() -> None:
    policy = stpt(candidates=[2.0, 1.0])
    action = next_round(policy)
    diverged = result(action.candidates[0], status="diverged", val_metric=0.99, val_loss=0.0)
    decision = policy.decide(
        action, [diverged, result(action.candidates[1], val_metric=0.0)], EMPTY
    )
    assert action.score_of(diverged) == float("-inf")
    assert decision.winner is not None
    assert decision.winner.candidate.index == 1


NAN = float("nan")


def test_when_all_diverge_the_round_is_repeated_at_half_the_base_rate() -> None:
    policy = stpt(candidates=[2.0, 1.0], initial=0.8)
    diverged = decide(policy, [NAN, NAN])
    assert diverged.winner is None
    assert (diverged.base_lr, diverged.next_base_lr) == (0.8, 0.4)
    again = next_round(policy, 40, History((diverged,)))
    assert (again.epoch, [c.lr for c in again.candidates]) == (40, [0.8, 0.4])


def add_diverged_rounds(policy: Stpt, epoch: int, count: int, history: History = EMPTY) -> History:
    """Return the history with `count` more rounds without a winner."""
    for _ in range(count):
        decision = decide(policy, [NAN, NAN], next_round(policy, epoch, history))
        history = history.after_round(decision)
    return history


def test_diverged_rounds_of_earlier_epochs_do_not_count() -> None:
    policy = stpt(candidates=[2.0, 1.0], initial=0.8)
    history = add_diverged_rounds(policy, 3, 2)
    history = history.after_round(decide(policy, [0.1, 0.2], next_round(policy, 3, history)))
    assert next_round(policy, 4, history).base_lr == pytest.approx(0.2)
    history = add_diverged_rounds(policy, 4, 2, history)
    assert next_round(policy, 4, history).base_lr == pytest.approx(0.05)
    rates = r"0.2, 0.1, 0.05, 0.025, 0.0125, 0.00625\."
    with pytest.raises(DivergedError, match=f"learning rates: {rates}"):
        policy.next(4, add_diverged_rounds(policy, 4, 4, history))
