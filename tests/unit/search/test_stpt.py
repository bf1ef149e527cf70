"""STPT line by line against the published rule and what our page adds where it is silent."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

from raytrain_opt.config.learning_rate import StptPolicy, Warmup
from raytrain_opt.errors import DivergedError, JobError
from raytrain_opt.optim.batch_ramp import EpochSteps
from raytrain_opt.search.policy import Candidate, CandidateResult, Plan, Round
from raytrain_opt.search.stpt import Stpt

ALPHA_STUDY = (10.0, 5.0, 3.0, 1.5, 1.0, 0.9, 0.5, 0.4)
NARROW = (1.25, 1.17, 1.08, 1.00, 0.95, 0.90, 0.85, 0.80)
MIDDLE = (2.50, 2.00, 1.50, 1.00, 0.85, 0.70, 0.55, 0.40)
WIDE = (5.00, 3.67, 2.33, 1.00, 0.80, 0.60, 0.40, 0.20)


def stpt(epochs: int = 40, steps_per_epoch: int = 10, **section: Any) -> Stpt:
    given = StptPolicy.model_validate({"policy": "stpt", **section})
    return Stpt(given, epochs, EpochSteps(steps_per_epoch))


def plan(policy: Stpt, epoch: int = 40, *history: Round) -> Plan:
    return policy.plan(epoch, history)


def result(candidate: Candidate, **outcome: Any) -> CandidateResult:
    values = {"status": "ok", "val_accuracy": 0.5, "val_loss": 1.0, "train_loss": 1.0, **outcome}
    return CandidateResult(candidate, samples=8, train_s=1.0, score_s=0.5, slot=0, **values)


def choose(policy: Stpt, accuracies: list[float], given: Plan | None = None) -> Round:
    """The decision when the candidates reach these accuracies; NaN: it diverged."""
    given = given or plan(policy)
    results = [
        result(
            candidate,
            val_accuracy=accuracy,
            status="diverged" if math.isnan(accuracy) else "ok",
        )
        for candidate, accuracy in zip(given.candidates, accuracies, strict=True)
    ]
    return policy.choose(given, results)


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
def test_a_set_is_in_force_from_the_first_epoch_to_the_last(
    candidates: Any, multipliers: tuple[float, ...]
) -> None:
    policy = stpt(candidates=candidates, initial=0.2)
    for epoch in (1, 20, 40):
        made = plan(policy, epoch)
        assert tuple(c.multiplier for c in made.candidates) == multipliers
        assert [c.lr for c in made.candidates] == pytest.approx([0.2 * m for m in multipliers])
        assert [c.index for c in made.candidates] == list(range(len(multipliers)))


def set_in_force(policy: Stpt, epoch: int) -> str:
    made = plan(policy, epoch)
    names = {(): "warm-up", NARROW: "narrow", MIDDLE: "middle", WIDE: "wide"}
    return names[tuple(c.multiplier for c in made.candidates)]


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
    assert [set_in_force(policy, epoch) for epoch in range(1, epochs + 1)] == expected


@pytest.mark.parametrize("epochs", [1, 2, 3, 4, 5])
def test_mix_plans_every_epoch_of_a_short_training(epochs: int) -> None:
    policy = stpt(epochs, candidates="mix")
    for epoch in range(1, epochs + 1):
        made = plan(policy, epoch)
        assert bool(made.candidates) != bool(made.lrs)


def test_include_adds_what_the_set_lacks_and_nothing_twice() -> None:
    def multipliers(**section: Any) -> tuple[float, ...]:
        return stpt(**section).multipliers(40)

    assert multipliers(candidates=[2.0, 0.5], include=[1.0]) == (2.0, 0.5, 1.0)
    assert multipliers(candidates=[2.0, 0.5], include=[3.0, 3.0]) == (2.0, 0.5, 3.0)
    assert multipliers(candidates="wide", include=[1.0]) == WIDE
    assert multipliers(candidates="mix", include=[1.3]) == (*WIDE, 1.3)


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
def test_alpha_is_iterations_or_a_share_of_the_epoch(
    alpha: float, steps_per_epoch: int, expected: int
) -> None:
    policy = stpt(steps_per_epoch=steps_per_epoch, alpha=alpha)
    assert policy.alpha_steps(1) == expected
    assert plan(policy).pretrain_steps == expected


def test_alpha_longer_than_an_epoch_is_refused() -> None:
    with pytest.raises(JobError, match=r"learning_rate\.alpha.*which has 10 iterations.*11"):
        stpt(steps_per_epoch=10, alpha=11)


# Warm-up.


def test_warm_up_epochs_have_no_candidates_and_climb_to_the_initial_rate() -> None:
    warmup = {"epochs": 2, "lr": 0.1, "shape": "linear"}
    policy = stpt(steps_per_epoch=2, candidates="narrow", initial=0.5, warmup=warmup)
    first, second, third = (plan(policy, epoch) for epoch in (1, 2, 3))
    assert (first.candidates, second.candidates) == ((), ())
    assert first.lrs == pytest.approx((0.1, 0.2))
    assert second.lrs == pytest.approx((0.3, 0.4))
    assert (third.lrs, third.base_lr, len(third.candidates)) == ((), 0.5, 8)


def test_constant_warm_up_is_the_papers() -> None:
    policy = stpt(candidates="mix", warmup={"epochs": 4, "lr": 0.005, "shape": "constant"})
    assert {lr for epoch in range(1, 5) for lr in plan(policy, epoch).lrs} == {0.005}
    assert plan(policy, 5).base_lr == 0.1


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


# Selection.


def test_the_highest_score_wins_and_its_rate_is_the_next_base_rate() -> None:
    policy = stpt(candidates=[2.0, 1.0, 0.5], initial=0.4)
    choice = choose(policy, [0.6, 0.7, 0.8])
    assert choice.winner is not None
    assert choice.winner.candidate == Candidate(2, 0.5, 0.2)
    assert choice.scores == (0.6, 0.7, 0.8)
    assert (choice.base_lr, choice.next_base_lr) == (0.4, 0.2)
    assert "val_accuracy" in choice.reason


def test_multipliers_accumulate_over_the_epochs() -> None:
    policy = stpt(candidates=[2.0, 0.5], initial=0.1)
    history: tuple[Round, ...] = ()
    for epoch, accuracies in enumerate(([0.9, 0.1], [0.9, 0.1], [0.1, 0.9]), start=1):
        made = policy.plan(epoch, history)
        history = (*history, choose(policy, accuracies, made))
    assert [r.base_lr for r in history] == pytest.approx([0.1, 0.2, 0.4])
    assert policy.plan(4, history).base_lr == pytest.approx(0.2)


def test_scored_by_loss_the_lowest_wins() -> None:
    policy = stpt(candidates=[2.0, 1.0], score="val_loss")
    made = plan(policy)
    better_loss, better_accuracy = made.candidates
    results = [
        result(better_loss, val_loss=0.5, val_accuracy=0.1),
        result(better_accuracy, val_loss=0.6, val_accuracy=0.9),
    ]
    choice = policy.choose(made, results)
    assert choice.winner == results[0]
    assert choice.scores == (-0.5, -0.6)


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
    choice = choose(stpt(candidates=candidates), accuracies)
    assert choice.winner is not None
    assert choice.winner.candidate.multiplier == winner
    assert "tied, multiplier closest to 1.0" in choice.reason


def test_without_a_tie_the_reason_speaks_of_none() -> None:
    assert "tied" not in choose(stpt(candidates=[2.0, 1.0]), [0.5, 0.6]).reason


def test_one_candidate_is_no_search_and_its_multiplier_accumulates() -> None:
    policy = stpt(candidates=[0.5], initial=0.8, warmup={"epochs": 1})
    plans = [plan(policy, epoch) for epoch in (2, 3)]
    assert [made.candidates for made in plans] == [(), ()]
    assert [set(made.lrs) for made in plans] == [{0.4}, {0.2}]
    assert {len(made.lrs) for made in plans} == {policy.steps.first}


# Divergence.


@pytest.mark.parametrize("score", ["val_accuracy", "val_loss"])
def test_a_diverged_candidate_never_wins(score: str) -> None:
    policy = stpt(candidates=[2.0, 1.0], score=score)
    made = plan(policy)
    gone = result(made.candidates[0], status="diverged", val_accuracy=0.99, val_loss=0.0)
    choice = policy.choose(made, [gone, result(made.candidates[1], val_accuracy=0.0)])
    assert choice.scores[0] == float("-inf")
    assert choice.winner is not None
    assert choice.winner.candidate.index == 1


NAN = float("nan")


def test_when_all_diverge_the_round_is_repeated_at_half_the_base_rate() -> None:
    policy = stpt(candidates=[2.0, 1.0], initial=0.8)
    lost = choose(policy, [NAN, NAN])
    assert lost.winner is None
    assert (lost.base_lr, lost.next_base_lr) == (0.8, 0.4)
    again = policy.plan(40, [lost])
    assert (again.epoch, [c.lr for c in again.candidates]) == (40, [0.8, 0.4])


def lost_rounds(
    policy: Stpt, epoch: int, count: int, history: tuple[Round, ...] = ()
) -> tuple[Round, ...]:
    """The history and as many rounds more that nobody won."""
    for _ in range(count):
        history = (*history, choose(policy, [NAN, NAN], policy.plan(epoch, history)))
    return history


@pytest.mark.parametrize(("given", "halvings"), [({}, 5), ({"max_halvings": 2}, 2)])
def test_the_round_is_repeated_max_halvings_times_then_refused(
    given: dict[str, int], halvings: int
) -> None:
    policy = stpt(candidates=[2.0, 1.0], initial=0.8, **given)
    history = lost_rounds(policy, 3, halvings + 1)
    rates = [f"{0.8 / 2**i:.4g}" for i in range(halvings + 1)]
    with pytest.raises(DivergedError, match="epoch 3.*" + ", ".join(rates)) as error:
        policy.plan(3, history)
    assert "2.0, 1.0" in str(error.value)


def test_lost_rounds_of_earlier_epochs_do_not_count() -> None:
    policy = stpt(candidates=[2.0, 1.0], initial=0.8, max_halvings=2)
    history = lost_rounds(policy, 3, 2)
    history = (*history, choose(policy, [0.1, 0.2], policy.plan(3, history)))
    assert policy.plan(4, history).base_lr == pytest.approx(0.2)
    history = lost_rounds(policy, 4, 2, history)
    assert policy.plan(4, history).base_lr == pytest.approx(0.05)
    with pytest.raises(DivergedError, match="learning rates: 0.2, 0.1, 0.05 "):
        policy.plan(4, lost_rounds(policy, 4, 1, history))


def test_policy_and_history_survive_a_pickle() -> None:
    policy = stpt(candidates=[2.0, 1.0])
    history = (choose(policy, [0.1, 0.2]),)
    again: Stpt = pickle.loads(pickle.dumps(policy))
    assert again.plan(5, pickle.loads(pickle.dumps(history))) == policy.plan(5, history)
