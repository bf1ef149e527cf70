"""The choice among optimizers on simulated trainings: who stays in the race, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

from raytrain_opt.config.learning_rate import HorizonPolicy
from raytrain_opt.config.updates import OptimizerChoiceSection, OptimizerSection
from raytrain_opt.errors import DivergedError
from raytrain_opt.optim.epoch_steps import EpochSteps, Length
from raytrain_opt.search.optimizer_race import why_without_muon
from raytrain_opt.search.policy import (
    Candidate,
    CandidateResult,
    History,
    TrainEpoch,
    TryCandidates,
    all_diverged,
)
from raytrain_opt.search.stpt_horizon import HorizonStpt, TaskFacts

AUTO = OptimizerChoiceSection.model_validate("auto").choices
MUON, SGD, SCHEDULE_FREE, ADAMW = range(4)
EPOCHS, STEPS = 16, 96


@dataclass(frozen=True)
class Optimizer:
    """A loss that grows with the distance in decades from the best rate, and falls with steps.

    `early`: part of the loss that vanishes with many steps. Every rate diverges from `limit` on.
    """

    best_lr: float
    loss: float
    early: float = 0.0
    limit: float = math.inf
    late: tuple[int, ...] = ()  # in so many steps, each rate has the loss
    late_loss: float = math.nan
    error: float = 0.0

    def result(self, candidate: Candidate, steps: int) -> CandidateResult:
        loss = self.loss + self.early / steps + math.log10(candidate.lr / self.best_lr) ** 2
        loss = math.nan if candidate.lr >= self.limit else loss
        loss = self.late_loss if steps in self.late else loss
        state = "diverged" if math.isnan(loss) else "ok"
        return CandidateResult(candidate, state, 0, loss, loss, 8, 1, 0, val_loss_error=self.error)


USUAL = {
    MUON: Optimizer(0.1, 2.0),
    SGD: Optimizer(0.1, 2.2),
    SCHEDULE_FREE: Optimizer(1.0, 2.1),
    ADAMW: Optimizer(0.001, 2.3),
}


def policy(optimizers: tuple[OptimizerSection, ...] = AUTO, **section: object) -> HorizonStpt:
    values = {"policy": "stpt_horizon", "max_search_cost": 0.25, **section}
    horizon = HorizonPolicy.model_validate(values)
    return HorizonStpt(horizon, Length(EPOCHS), EpochSteps(STEPS), optimizers)


def search(
    policy: HorizonStpt, optimizers: Mapping[int, Optimizer]
) -> tuple[list[TryCandidates], TrainEpoch, History]:
    """Make the decisions before epoch 1; return the rounds and what follows."""
    history, rounds = History(), []
    while isinstance(action := policy.next(1, history), TryCandidates):
        rounds.append(action)
        steps = action.pretrain_steps
        results = [optimizers[c.optimizer].result(c, steps) for c in action.candidates]
        history = history.after_round(policy.decide(action, results, history))
    return rounds, action, history


def peak(history: History) -> float:
    return history.decisions[-1].next_base_lr


def raced(rounds: list[TryCandidates], stage: str) -> list[int]:
    """Return the optimizer of each round of a stage."""
    return [r.candidates[0].optimizer for r in rounds if r.stage == stage]


def test_all_optimizers_start_and_two_get_longer_schedules() -> None:
    rounds, action, history = search(policy(), USUAL)
    assert raced(rounds, "coarse") == [MUON, SGD, SCHEDULE_FREE, ADAMW]
    assert sorted(set(raced(rounds, "fine"))) == [MUON, SCHEDULE_FREE]
    assert action.steps.optimizer == MUON
    assert peak(history) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("best", range(4))
def test_the_optimizer_with_the_lowest_loss_trains_at_its_own_best_rate(best: int) -> None:
    losses = {index: Optimizer(o.best_lr, 3.0) for index, o in USUAL.items()}
    losses[best] = Optimizer(USUAL[best].best_lr * 10, 2.0)
    _, action, history = search(policy(), losses)
    assert action.steps.optimizer == best
    usual = AUTO[best].traits.usual_lr or math.nan  # counts as 8 steps beside 36
    drawn = (36 * math.log10(USUAL[best].best_lr * 10) + 8 * math.log10(usual)) / (36 + 8)
    assert peak(history) == pytest.approx(10**drawn, rel=0.01)
    assert f"{AUTO[best].name} has the lowest loss" in history.decisions[-1].reason


def test_the_preferred_optimizer_gets_longer_schedules_however_it_starts() -> None:
    losses = {**USUAL, MUON: Optimizer(0.1, 2.0, early=40.0)}
    rounds, action, _ = search(policy(), losses)
    assert sorted(set(raced(rounds, "fine"))) == [MUON, SCHEDULE_FREE]
    assert action.steps.optimizer == SCHEDULE_FREE
    rounds, _, _ = search(policy(), {**losses, MUON: Optimizer(0.1, 2.0, limit=0.0)})
    assert sorted(set(raced(rounds, "fine"))) == [SGD, SCHEDULE_FREE]


@pytest.mark.parametrize(("loss", "tried"), [(2.1, 1), (2.03, 3)])
def test_the_second_tries_all_its_rates_only_if_it_is_close(loss: float, tried: int) -> None:
    rounds, action, history = search(policy(), {**USUAL, SCHEDULE_FREE: Optimizer(1.0, loss)})
    fine = [r for r in rounds if r.stage == "fine" for _ in r.candidates]
    assert raced(fine, "fine") == [MUON] * 3 + [SCHEDULE_FREE] * tried
    assert action.steps.optimizer == MUON
    assert f"(Muon 2.000, ScheduleFreeSGD {loss:.3f};" in history.decisions[-1].reason


def test_the_second_goes_on_if_its_first_candidate_diverged() -> None:
    """Here its longer schedules diverge from the rate on that was best in short ones."""

    @dataclass(frozen=True)
    class Unstable(Optimizer):
        def result(self, candidate: Candidate, steps: int) -> CandidateResult:
            limit = 0.9 if steps > 20 else math.inf
            return replace(Optimizer(1.0, 1.9), limit=limit).result(candidate, steps)

    rounds, action, _ = search(policy(), {**USUAL, SCHEDULE_FREE: Unstable(1.0, 1.9)})
    assert action.steps.optimizer == MUON
    *_, last = rounds
    assert (last.stage, last.candidates[0].optimizer) == ("fine", SCHEDULE_FREE)
    assert last.candidates[0].lr == pytest.approx(10**-0.5)


def test_one_that_is_only_ahead_early_loses_to_one_that_is_ahead_later() -> None:
    """SGD has the lower loss after the coarse stage, Muon after the fine one."""
    losses = {index: Optimizer(o.best_lr, 9.0) for index, o in USUAL.items()}
    losses |= {SGD: Optimizer(0.1, 2.2), MUON: Optimizer(0.1, 2.0, early=4.0)}
    rounds, action, _ = search(policy(), losses)
    assert SGD in raced(rounds, "fine")
    assert action.steps.optimizer == MUON


def test_schedule_free_keeps_its_rate_and_the_others_let_it_fall() -> None:
    rounds, _, _ = search(policy(), USUAL)
    ends = {r.candidates[0].optimizer: r.lr_shape[-1] for r in rounds}
    assert ends[SCHEDULE_FREE] == 1
    assert all(end < 0.2 for index, end in ends.items() if index != SCHEDULE_FREE)
    losses = {**USUAL, SCHEDULE_FREE: Optimizer(1.0, 1.0)}
    _, _, history = search(policy(), losses)
    for epoch in (2, EPOCHS):
        action = policy().next(epoch, history)
        assert isinstance(action, TrainEpoch)
        assert action.steps.optimizer == SCHEDULE_FREE
        assert action.steps.lrs[-1] == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("factor", [0.01, 1.0, 100.0])
def test_the_search_stays_within_its_budget_and_finds_the_same_peak(factor: float) -> None:
    rounds, action, history = search(policy(initial=0.1 * factor), USUAL)
    steps = sum(len(r.candidates) * r.pretrain_steps for r in rounds)
    assert steps <= 0.25 * EPOCHS * STEPS
    assert action.steps.optimizer == MUON
    assert peak(history) == pytest.approx(0.1, rel=0.35)


def test_when_all_of_all_optimizers_diverge_the_likely_cause_is_named() -> None:
    losses = {index: Optimizer(0.1, 2.0, limit=0.0) for index in USUAL}
    with pytest.raises(DivergedError, match=r"every candidate .*data or a loss"):
        search(policy(), losses)


def test_a_metric_that_is_not_finite_is_named() -> None:
    result = replace(CandidateResult.lost(Candidate(0, 1.0, 0.1)), status="diverged")
    error = all_diverged(1, [0.1], [replace(result, train_loss=1.0, val_loss=1.0)])
    assert "the metric accuracy of every candidate" in str(error)


def test_one_whose_longer_schedules_all_diverge_leaves() -> None:
    """The other one with the next lowest loss takes its place."""
    diverging = Optimizer(1.0, 1.9, late=tuple(range(31, 97)))
    losses = {**USUAL, SCHEDULE_FREE: diverging, SGD: Optimizer(0.1, 1.95)}
    rounds, action, _ = search(policy(max_search_cost=1.0), losses)
    assert action.steps.optimizer == SGD
    assert set(raced(rounds, "fine")) == {MUON, SCHEDULE_FREE, SGD}


@pytest.mark.parametrize(
    ("step", "batch", "steps", "too_costly"),
    [
        (4e12, 1e12, 1e6, False),
        (4.1e12, 1e12, 1e6, True),
        (5e9, 1e6, 1000, False),
        (5e9, 1e6, 1001, True),
        (5e9, 1e6, math.inf, True),
        (5e9, 2e9, math.inf, False),
    ],
)
def test_steps_may_take_four_times_the_operations_of_a_batch_or_few_in_a_training(
    step: float, batch: float, steps: float, *, too_costly: bool
) -> None:
    assert (why_without_muon(step, batch, steps) is not None) is too_costly


@pytest.mark.parametrize(("order", "usual_lr"), [(1, 0.1), (-1, 0.001)])
def test_with_few_steps_only_the_first_is_searched(order: int, usual_lr: float) -> None:
    """24 updates in each of 16 epochs: 76 steps, of which four optimizers need 105."""
    few = replace(policy(AUTO[::order], max_search_cost=0.2), steps=EpochSteps(24))
    rounds, action, history = search(few, {0: Optimizer(4 * usual_lr, 2.3)})
    assert sum(len(r.candidates) * r.pretrain_steps for r in rounds) <= 76
    assert action.steps.optimizer == 0
    assert 2 < peak(history) / usual_lr < 8


@pytest.mark.parametrize("epoch_steps", [1, 11])
def test_candidates_are_longer_than_short_epochs(epoch_steps: int) -> None:
    length, steps = Length(300 // epoch_steps), EpochSteps(epoch_steps)
    short = replace(policy(AUTO, max_search_cost=1.0), length=length, steps=steps)
    rounds, _, _ = search(short, USUAL)
    assert {r.pretrain_steps for r in rounds if r.stage == "fine"} == {28}


@pytest.mark.parametrize("optimizers", [AUTO, AUTO[::-1]])
def test_without_steps_to_search_the_first_optimizer_trains_at_its_usual_rate(
    optimizers: tuple[OptimizerSection, ...],
) -> None:
    section = HorizonPolicy(policy="stpt_horizon")
    action = HorizonStpt(section, Length(2), EpochSteps(20), optimizers).next(1, History())
    assert isinstance(action, TrainEpoch)
    assert action.steps.optimizer == 0
    # The rise of the first two of 20 steps: 0.25 and 0.75 of the peak.
    assert action.steps.lrs[0] == pytest.approx((optimizers[0].traits.usual_lr or 0) * 0.5 / 4)


def test_the_preferred_optimizer_stays_where_none_is_better_by_more_than_noise() -> None:
    noisy = {index: replace(o, error=0.15) for index, o in USUAL.items()}
    rounds, action, history = search(policy(), {**noisy, MUON: Optimizer(0.1, 2.3)})
    assert sorted(set(raced(rounds, "fine"))) == [MUON, SGD]  # ScheduleFreeSGD is no better
    assert action.steps.optimizer == MUON
    reason = history.decisions[-1].reason
    assert "Muon trains: none is better by more than noise (Muon 2.300" in reason
    assert "standard error 0.15" in reason
    behind = {**USUAL, MUON: Optimizer(0.1, 2.2)}
    assert search(policy(), behind)[1].steps.optimizer == SCHEDULE_FREE
    unsure = {**USUAL, MUON: Optimizer(0.1, 2.0, error=1.0)}  # it has not learned
    assert search(policy(), unsure)[1].steps.optimizer == SCHEDULE_FREE
    first_adamw = {3 - i: o for i, o in noisy.items()} | {0: Optimizer(0.001, 2.1)}
    assert search(policy(AUTO[::-1]), first_adamw)[1].steps.optimizer == 0


def test_a_peak_is_drawn_to_the_usual_rate_by_the_square_of_the_doubt() -> None:
    """The gain over a rate a decade below is 1, the noise two errors; the usual rate is 0.1."""
    for error, pull in ((0.4, 0.64), (0.45, 0.81), (0.49, 0.9604)):
        _, _, history = search(policy(AUTO[:1]), {MUON: Optimizer(1.0, 2.0, error=error)})
        assert math.log10(peak(history)) == pytest.approx(-pull, abs=0.01)


@pytest.mark.parametrize(("order", "name"), [(1, "Muon, peak 0.1"), (-1, "AdamW, peak 0.003")])
@pytest.mark.parametrize(("loss", "error"), [(2.0, 1.5), (150.0, 0.0)])
def test_the_first_of_the_list_trains_at_its_usual_rate_where_none_learned(
    loss: float, error: float, order: int, name: str
) -> None:
    """The best candidate is 1 below one that hardly trained."""
    usual = dict(enumerate([*USUAL.values()][::order]))
    losses = {i: Optimizer(o.best_lr * 3, loss + (i > 0), error=error) for i, o in usual.items()}
    _, action, history = search(policy(AUTO[::order]), losses)
    usual_lr = AUTO[::order][0].traits.usual_lr
    assert (action.steps.optimizer, peak(history)) == (0, pytest.approx(usual_lr))
    reason = history.decisions[-1].reason
    assert reason.startswith(f"not decided: {name}: ")
    assert "lowest loss" not in reason


@pytest.mark.parametrize(
    ("channel_norm", "epochs", "chosen"), [(True, 16, MUON), (False, 15, MUON), (False, 16, SGD)]
)
def test_samples_that_are_often_repeated_are_not_left_to_muon_where_nothing_is_decided(
    epochs: int, chosen: int, *, channel_norm: bool
) -> None:
    facts, noisy = TaskFacts(channel_norm), {i: replace(o, error=1.5) for i, o in USUAL.items()}
    _, action, _ = search(replace(policy(), length=Length(epochs), facts=facts), noisy)
    assert action.steps.optimizer == chosen


@pytest.mark.parametrize(
    ("early", "section", "step_flops", "epoch_steps", "fine"),
    [
        (6.0, {}, 1e6, 90, [28, 96]),
        (6.0, {"max_search_cost": 0.2}, 1e6, STEPS, [29]),
        (6.0, {}, 1e6, STEPS, [29]),  # of more than 1,500 updates
        (0.05, {}, 1e6, 90, [28, 96]),
        (0.05, {}, 1e12, 90, [29]),
        (0.05, {}, 1e6, 50, [28, 49]),  # not twice as long
        (1.0, {}, 1e6, 90, [28]),
    ],
)
def test_a_search_that_is_not_clear_is_repeated_with_longer_candidates(
    early: float, section: dict[str, float], step_flops: float, epoch_steps: int, fine: list[int]
) -> None:
    """Above a guess after 29 steps with 6. From 7 steps it falls by 0.1 early; noise: 0.02."""
    late = {i: replace(o, loss=o.loss - 0.1, early=early, error=0.01) for i, o in USUAL.items()}
    facts = TaskFacts(step_flops=step_flops, guessing_loss=2.05)
    auto = policy(**{"max_search_cost": "auto", **section})
    rounds, _, history = search(replace(auto, facts=facts, steps=EpochSteps(epoch_steps)), late)
    steps = [r.pretrain_steps for r in rounds if r.stage == "fine"]
    assert list(dict.fromkeys(steps)) == fine
    reason = history.decisions[-1].reason
    assert reason.startswith("not decided: ") is (early == 6 and len(fine) == 1)


@pytest.mark.parametrize("late_loss", [math.nan, 2.0])
def test_a_choice_stands_if_longer_candidates_diverge_or_decide_nothing(late_loss: float) -> None:
    late = {"early": 0.05, "error": 0.01, "late": (23, *range(30, 97)), "late_loss": late_loss}
    losses = {index: replace(o, **late) for index, o in USUAL.items()}
    searching = replace(policy(max_search_cost="auto"), facts=TaskFacts(step_flops=1e6))
    rounds, action, history = search(replace(searching, steps=EpochSteps(90)), losses)
    assert rounds[-1].pretrain_steps in late["late"]
    assert action.steps.optimizer == MUON
    assert peak(history) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize(("guess", "decided"), [(2.05, False), (2.5, True), (math.inf, True)])
def test_several_optimizers_are_compared_below_the_loss_of_a_guess_by_class(
    guess: float, *, decided: bool
) -> None:
    """Their losses are 3 where they hardly trained, and 2 at best, with an error of 0.03."""
    losses = {index: replace(o, error=0.03) for index, o in USUAL.items()}
    _, _, history = search(replace(policy(), facts=TaskFacts(guessing_loss=guess)), losses)
    reason = history.decisions[-1].reason
    assert reason.startswith("not decided: ") is not decided
    assert ("is not below 2.05, that of a guess by class" in reason) is not decided
    _, _, history = search(replace(policy(AUTO[:1]), facts=TaskFacts(guessing_loss=guess)), losses)
    assert not history.decisions[-1].reason.startswith("not decided: ")
