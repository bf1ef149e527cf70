"""stpt_horizon on made-up trainings: a loss surface of rate and steps, with noise."""

from __future__ import annotations

import math
import pickle
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from raytrain_opt.config.learning_rate import HorizonPolicy
from raytrain_opt.errors import DivergedError
from raytrain_opt.optim.batch_ramp import EpochSteps
from raytrain_opt.search.policy import Candidate, CandidateResult, Plan, Round
from raytrain_opt.search.squeezed import WholeSchedule
from raytrain_opt.search.stpt_horizon import HorizonStpt

BLOCKS = 100


def horizon(epochs: int = 16, steps: int = 125, ramp: Any = (), **section: Any) -> HorizonStpt:
    given = HorizonPolicy.model_validate({"policy": "stpt_horizon", **section})
    return HorizonStpt(given, epochs, EpochSteps(steps, ramp))


@dataclass
class Surface:
    """Training that is best at rate `best`, and with fewer than `unbiased_steps` at lower ones.

    The loss grows with the square of the decades between. Each block of samples has a difficulty
    that all candidates meet, and `noise` of its own for each rate.
    `factor`: the one that later rounds of an epoch find best.
    """

    best: float = 0.1
    diverges_from: float = math.inf
    noise: float = 0.05
    unbiased_steps: int = 1
    seed: int = 0
    factor: Callable[[int], float] = lambda epoch: 1.0

    def result(self, plan: Plan, candidate: Candidate) -> CandidateResult:
        noise = self._draw(f"{candidate.lr:.6g} {plan.pretrain_steps}")
        blocks = self.loss(plan, candidate) + self._draw("all") + self.noise * noise
        lost = candidate.lr >= self.diverges_from
        return result(candidate, [math.nan] * BLOCKS if lost else blocks.tolist())

    def _draw(self, which: str) -> Any:
        return np.random.default_rng(zlib.crc32(f"{self.seed} {which}".encode())).normal(
            size=BLOCKS
        )

    def loss(self, plan: Plan, candidate: Candidate) -> float:
        if plan.stage == "later":
            return 1 + math.log10(candidate.multiplier / self.factor(plan.epoch)) ** 2
        best = self.best * min(1.0, plan.pretrain_steps / self.unbiased_steps)
        return 1 + math.log10(candidate.lr / best) ** 2


def result(candidate: Candidate, blocks: list[float]) -> CandidateResult:
    mean = sum(blocks) / len(blocks)
    return CandidateResult(
        candidate,
        "diverged" if math.isnan(mean) else "ok",
        val_accuracy=0.5,
        val_loss=mean,
        train_loss=mean,
        samples=8,
        train_s=1.0,
        score_s=0.1,
        slot=0,
        val_losses=tuple(blocks),
    )


def always(factor: float) -> Surface:
    return Surface(factor=lambda epoch: factor)


@dataclass
class Training:
    """What the driver would have seen. `commits`: the history after each epoch."""

    plans: list[Plan]
    commits: list[tuple[Round, ...]]

    @property
    def asked(self) -> list[Plan]:
        return [plan for plan in self.plans if plan.candidates]

    @property
    def opening(self) -> list[Plan]:
        return [plan for plan in self.asked if plan.epoch == 1]

    @property
    def later(self) -> list[Plan]:
        return [plan for plan in self.asked if plan.epoch > 1]

    @property
    def peak(self) -> float:
        """That epoch 1 trains with."""
        return self.commits[0][-1].next_base_lr

    def lrs(self, policy: HorizonStpt) -> list[float]:
        """Of every step of the training."""
        lrs: list[float] = []
        for plan, history in zip(self.mains, self.commits, strict=True):
            last = history[-1] if history else None
            asked = [p for p in self.asked if p.epoch == plan.epoch and p.kept_steps]
            if asked and last is not None and last.winner is not None:
                lrs.extend(last.winner.candidate.lrs(asked[-1])[: asked[-1].kept_steps])
            lrs.extend(plan.lrs)
        return lrs

    @property
    def mains(self) -> list[Plan]:
        return [plan for plan in self.plans if plan.lrs]


def trained(
    policy: HorizonStpt, surface: Surface | None = None, history: tuple[Round, ...] = ()
) -> Training:
    """As the driver does it, on the epochs that the history leaves."""
    surface = surface or Surface()
    first = history[-1].epoch + 1 if history else 1
    plans, commits = [], []
    for epoch in range(first, policy.epochs + 1):
        plan = policy.plan(epoch, history)
        plans.append(plan)
        while plan.candidates:
            results = [surface.result(plan, candidate) for candidate in plan.candidates]
            history = (*history, policy.choose(plan, results))
            plan = policy.plan(epoch, history)
            plans.append(plan)
        commits.append(history)
    return Training(plans, commits)


def cost(training: Training, policy: HorizonStpt) -> float:
    """Of the search: share of the training's samples."""
    asked = sum(
        len(p.candidates) * p.pretrain_steps / policy.steps(p.epoch) for p in training.asked
    )
    return asked / policy.epochs


def rates(plan: Plan) -> list[float]:
    return [candidate.lr for candidate in plan.candidates]


# The schedule.


def test_the_shares_of_a_small_schedule_written_out() -> None:
    """Linear: 2 of 10 steps warm up, the middle of each step counts."""
    schedule = WholeSchedule("linear", 0.2)
    assert schedule.squeezed(10) == pytest.approx(
        [0.25, 0.75, *(share / 16 for share in (15, 13, 11, 9, 7, 5, 3, 1))]
    )
    assert [schedule.at(done) for done in (0.0, 0.1, 0.2, 0.6, 1.0)] == pytest.approx(
        [0, 0.5, 1, 0.5, 0]
    )


def test_cosine_has_the_same_ends_and_middle() -> None:
    schedule = WholeSchedule("cosine", 0.2)
    shares = [schedule.at(done) for done in (0.1, 0.2, 0.4, 0.6, 1.0)]
    assert shares == pytest.approx([0.5, 1, (1 + math.sqrt(0.5)) / 2, 0.5, 0])


def test_without_warm_up_it_begins_at_the_peak() -> None:
    assert WholeSchedule("linear", 0.0).at(0) == 1


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_squeezed_it_has_the_same_mean_and_the_same_values(shape: Any) -> None:
    schedule = WholeSchedule(shape, 0.1)
    short, long = schedule.squeezed(20), schedule.squeezed(2000)
    assert sum(short) / 20 == pytest.approx(sum(long) / 2000, abs=1e-3)
    assert long[50::100] == pytest.approx(short, abs=0.01)
    assert max(long) == pytest.approx(1, abs=0.01)
    assert 0 < long[-1] < 1e-3


def test_what_is_left_of_it_is_squeezed_from_there_on() -> None:
    left = WholeSchedule("linear", 0.2).squeezed(2, done=0.6)
    assert left == pytest.approx([0.375, 0.125])


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_training_runs_through_the_whole_schedule_at_the_peak_that_was_found(shape: Any) -> None:
    policy = horizon(epochs=5, steps=80, shape=shape, warmup_share=0.2, rounds_at=[])
    training = trained(policy)
    whole = [training.peak * share for share in WholeSchedule(shape, 0.2).squeezed(400)]
    assert training.lrs(policy) == pytest.approx(whole)
    assert training.lrs(policy)[-1] < 0.01 * training.peak


def test_epochs_with_fewer_and_larger_batches_go_through_as_much_of_it() -> None:
    policy = horizon(epochs=4, steps=100, ramp=((3, 50),), rounds_at=[])
    training = trained(policy)
    assert [len(plan.lrs) for plan in training.mains] == [100, 100, 50, 50]
    peak, schedule = training.peak, policy.schedule
    third, fourth = training.mains[2].lrs, training.mains[3].lrs
    assert third[0] == pytest.approx(peak * schedule.at(0.5 + 0.25 / 100))
    assert fourth[-1] == pytest.approx(peak * schedule.at(1 - 0.25 / 100))


# The first grid.


def test_the_first_round_tries_whole_schedules_a_decade_apart() -> None:
    plan = horizon(initial=0.1).plan(1, ())
    assert rates(plan) == pytest.approx([0.01, 0.1, 1.0])
    assert [c.multiplier for c in plan.candidates] == pytest.approx([0.1, 1, 10])
    assert plan.shape == horizon().schedule.squeezed(15)
    assert (plan.kept_steps, plan.paired) == (0, True)


def test_the_second_round_tries_longer_schedules_to_both_sides_of_the_best() -> None:
    training = trained(horizon(initial=0.1), Surface(0.08))
    coarse, fine = training.opening
    assert (coarse.stage, fine.stage) == ("coarse", "fine")
    assert rates(fine) == pytest.approx([0.0316, 0.1, 0.316], rel=0.01)
    assert (coarse.pretrain_steps, fine.pretrain_steps) == (15, 62)
    assert fine.shape == horizon().schedule.squeezed(62)


def test_horizon_sets_how_long_the_candidates_train() -> None:
    training = trained(horizon(steps=1000, horizon=0.25))
    assert [plan.pretrain_steps for plan in training.opening] == [62, 250]


# What is chosen.


@pytest.mark.parametrize("best", [0.003, 0.02, 0.06, 0.1, 0.3, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_peak_is_near_the_best(best: float, seed: int) -> None:
    training = trained(horizon(), Surface(best, noise=0.1, seed=seed))
    assert 0.5 < training.peak / best < 2


@dataclass
class Given(Surface):
    """The coarse candidates have losses of 4, 3.5 and 9, the fine ones the given."""

    noise: float = 0.0
    fine: tuple[float, ...] = ()

    def loss(self, plan: Plan, candidate: Candidate) -> float:
        of_stage = {"coarse": (4.0, 3.5, 9.0), "fine": self.fine}
        lowest = -1.0 if plan.stage == "coarse" else -0.5
        place = (math.log10(candidate.lr / 0.1) - lowest) / -lowest
        return of_stage[plan.stage][round(place)] if place > -0.5 else 4.0


def test_the_peak_is_the_mean_log_rate_weighted_by_the_fourth_power_of_gains() -> None:
    """By hand: gains over 4 are 1, 2, 1 at -1.5, -1, -0.5: weighted 1, 16, 1 that is -1. With 2
    at -0.5 too, weighted 1, 16, 16: -25.5 / 33.
    """
    assert trained(horizon(rounds_at=[]), Given(fine=(3, 2, 3))).peak == pytest.approx(0.1)
    training = trained(horizon(rounds_at=[]), Given(fine=(3, 2, 2)))
    assert training.peak == pytest.approx(10 ** (-25.5 / 33))
    decided = training.commits[0][-1]
    assert "the centre of what gains" in decided.reason
    assert decided.winner is not None
    assert decided.winner.candidate.lr == pytest.approx(0.1)


def test_one_lucky_candidate_does_not_decide_alone() -> None:
    """Its neighbours above gain nearly as much."""
    assert 0.06 < trained(horizon(rounds_at=[]), Given(fine=(2.0, 2.1, 2.2))).peak < 0.11


def test_where_nothing_gains_the_best_is_taken() -> None:
    assert trained(horizon(rounds_at=[]), Given(fine=(4.3, 4.2, 4.5))).peak == pytest.approx(0.1)


def test_of_coarse_rates_that_are_hardly_worse_the_largest_is_gone_on_from() -> None:
    """1 % worse at 1; it diverges at 10."""
    training = trained(horizon(), AboutAsGood(diverges_from=9))
    fine = next(plan for plan in training.opening if plan.stage == "fine")
    assert rates(fine) == pytest.approx([0.316, 1.0, 3.16], rel=0.01)


class AboutAsGood(Surface):
    """Few steps tell hardly anything."""

    def loss(self, plan: Plan, candidate: Candidate) -> float:
        if plan.stage == "coarse":
            return 4.0 + 0.02 * math.log10(candidate.lr)
        return super().loss(plan, candidate)


@pytest.mark.parametrize("wrong_by", [0.01, 1.0, 100.0])
@pytest.mark.parametrize(
    ("epochs", "steps"), [(4, 125), (4, 2500), (16, 32), (16, 125), (16, 2500), (90, 32)]
)
def test_a_start_that_is_wrong_by_100_ends_at_the_same_peak(
    wrong_by: float, epochs: int, steps: int
) -> None:
    def found(initial: float) -> float:
        policy = horizon(epochs, steps, initial=initial, rounds_at=[])
        return trained(policy, Surface(0.15, diverges_from=30)).peak

    assert found(0.1 * wrong_by) == pytest.approx(found(0.1))


def test_a_start_between_the_points_of_the_lattice_ends_at_the_same_peak() -> None:
    surface = Surface(0.15)
    assert trained(horizon(initial=0.04), surface).peak == trained(horizon(), surface).peak


@pytest.mark.parametrize("best", [3e-4, 50.0])
def test_the_grid_is_extended_past_the_edge_where_the_best_is(best: float) -> None:
    training = trained(horizon(), Surface(best))
    first, *more = training.opening
    assert all(len(plan.candidates) == 1 for plan in more if plan.stage == "coarse")
    assert len(first.candidates) == 3
    assert "edge" in training.commits[0][0].reason
    assert 0.5 < training.peak / best < 2


def test_candidates_are_numbered_through_the_epoch() -> None:
    training = trained(horizon(), Surface(50.0))
    numbers = [c.index for plan in training.opening for c in plan.candidates]
    assert numbers == list(range(len(numbers)))


def test_the_fine_grid_is_extended_too() -> None:
    """Downward, where the best is at its lower edge: upward the coarse stage knows better."""
    training = trained(
        horizon(epochs=90),
        Surface(0.04, noise=0.01),
    )
    fine = [plan for plan in training.opening if plan.stage == "fine"]
    assert len(fine) >= 2
    assert max(rates(fine[-1])) < min(rates(fine[0]))
    assert {plan.pretrain_steps for plan in fine} == {62}


# Divergence.


def test_diverging_rates_are_neither_chosen_nor_tried_longer() -> None:
    training = trained(horizon(), Surface(0.2, diverges_from=0.6))
    assert training.peak < 0.6
    # 0.562 is not known to: 1 is.
    assert all(max(rates(plan)) < 0.9 for plan in training.opening if plan.stage == "fine")


def test_rates_that_did_worse_than_hardly_training_get_no_longer_schedule() -> None:
    training = trained(horizon(), FiniteCliff(0.08))
    fine = training.opening[-1]
    assert rates(fine) == pytest.approx([0.0316, 0.1, 0.316], rel=0.01)
    assert 0.05 < training.peak < 0.11


class FiniteCliff(Surface):
    """The loss of large rates is large, but a number."""

    def loss(self, plan: Plan, candidate: Candidate) -> float:
        return 1e6 if candidate.lr > 0.3 else super().loss(plan, candidate)


def test_when_all_diverge_the_grid_goes_down() -> None:
    training = trained(horizon(initial=1e4), Surface(0.1, diverges_from=0.5))
    lost = training.commits[0][0]
    assert (lost.winner, set(lost.scores)) == (None, {-math.inf})
    assert 0.05 < training.peak < 0.5


def test_when_all_diverge_again_and_again_the_error_lists_what_was_tried() -> None:
    policy, surface = horizon(), Surface(diverges_from=0.0)
    with pytest.raises(
        DivergedError, match=r"epoch 1.*: 1e-10, 1e-09, .*, 0\.1, .*learning_rate\.initial"
    ):
        trained(policy, surface)


def lost_rounds(
    policy: HorizonStpt, epoch: int, count: int, history: tuple[Round, ...] = ()
) -> tuple[Round, ...]:
    """The history and as many rounds more in which all diverged."""
    for _ in range(count):
        plan = policy.plan(epoch, history)
        gone = [result(candidate, [math.nan]) for candidate in plan.candidates]
        history = (*history, policy.choose(plan, gone))
    return history


def test_the_last_lost_round_is_decided_before_plan_raises() -> None:
    """So the driver has written it down when the run ends."""
    policy = horizon()
    history = lost_rounds(policy, 1, 9)
    assert all(choice.winner is None and "all" in choice.reason for choice in history)
    with pytest.raises(DivergedError):
        policy.plan(1, history)


# The budget.


@pytest.mark.parametrize(
    ("epochs", "steps"),
    [(1, 1), (1, 5000), (4, 1), (4, 32), (4, 125), (4, 5000), (16, 7), (16, 32), (16, 125)]
    + [(16, 1000), (90, 1), (90, 7), (90, 32), (90, 125)],
)
@pytest.mark.parametrize(
    ("section", "noise"),
    [({}, 0.01), ({}, 1.0), ({"horizon": 1.0}, 1.0), ({"budget": 0.05, "initial": 1e-3}, 0.01)],
)
def test_the_budget_is_kept(
    epochs: int, steps: int, section: dict[str, Any], noise: float
) -> None:
    policy = horizon(epochs, steps, **section)
    training = trained(policy, Surface(noise=noise, factor=lambda epoch: 2.0))
    assert cost(training, policy) <= policy.section.budget
    for plan in training.asked:
        assert plan.pretrain_steps <= policy.steps(plan.epoch)


@pytest.mark.parametrize(("epochs", "steps", "most"), [(16, 96, 0.12), (90, 125, 0.04)])
def test_what_a_search_costs_as_a_rule(epochs: int, steps: int, most: float) -> None:
    policy = horizon(epochs, steps)
    assert 0.02 < cost(trained(policy, Surface(noise=0.0)), policy) <= most


def test_a_training_of_four_epochs_has_a_search_too() -> None:
    training = trained(horizon(4, 125, initial=0.01), Surface(0.1))
    assert {plan.stage for plan in training.opening} == {"coarse", "fine"}
    assert 0.3 < training.peak / 0.1 < 3.2


def test_a_training_that_is_too_short_for_any_search_uses_the_initial_rate() -> None:
    policy = horizon(2, 20, initial=0.07)
    training = trained(policy)
    assert not training.asked
    assert max(training.lrs(policy)) == pytest.approx(0.07, rel=0.2)
    assert "learning_rate.budget" in training.plans[0].reason


# Later rounds.


def later_epochs(training: Training) -> list[int]:
    return [plan.epoch for plan in training.later]


def test_later_rounds_end_when_one_changed_nothing() -> None:
    assert later_epochs(trained(horizon(96), always(1.0))) == [13]
    assert later_epochs(trained(horizon(96), always(2.0))) == [13, 25, 49]
    half_way = Surface(factor=lambda epoch: 2.0 if epoch == 13 else 1.0)
    assert later_epochs(trained(horizon(96), half_way)) == [13, 25]


def test_later_rounds_are_where_they_are_asked_for() -> None:
    assert later_epochs(trained(horizon(96, rounds_at=[]), always(2.0))) == []
    policy = horizon(96, rounds_at=[0.0, 0.3, 0.6])
    assert later_epochs(trained(policy, always(2.0))) == [30, 59]


def test_a_training_with_little_budget_left_has_none() -> None:
    assert later_epochs(trained(horizon(16, 96), always(2.0))) == []


def test_the_factors_accumulate_and_the_rest_of_the_training_follows() -> None:
    policy = horizon(96)
    factors = {13: 0.5, 25: 0.5, 49: 2.0}
    training = trained(policy, Surface(factor=factors.__getitem__))
    peaks = [history[-1].next_base_lr / training.peak for history in training.commits]
    assert [peaks[epoch - 1] for epoch in (12, 13, 25, 48, 49, 96)] == pytest.approx(
        [1, 0.5, 0.25, 0.25, 0.5, 0.5]
    )
    whole = policy.schedule.squeezed(96 * 125)
    in_force = [training.peak * peaks[step // 125] for step in range(96 * 125)]
    assert training.lrs(policy) == pytest.approx(
        [peak * share for peak, share in zip(in_force, whole, strict=True)]
    )


def test_a_candidate_trains_real_steps_and_then_the_rest_of_the_decay_squeezed() -> None:
    policy = horizon(96)
    (plan,) = trained(policy).later
    assert [c.multiplier for c in plan.candidates] == [0.5, 1.0, 2.0]
    assert rates(plan) == pytest.approx([plan.base_lr * f for f in (0.5, 1, 2)])
    kept, whole = plan.kept_steps, policy.schedule.squeezed(96 * 125)
    first = 12 * 125
    assert plan.shape[:kept] == pytest.approx(whole[first : first + kept])
    squeezed = plan.shape[kept:]
    assert squeezed[0] == pytest.approx(plan.shape[kept - 1], rel=0.05)
    assert squeezed[-1] < 0.05
    assert list(squeezed) == sorted(squeezed, reverse=True)
    # 0.5 epochs for a whole schedule: 7/8 of that for what is left of this one.
    assert (kept, plan.pretrain_steps) == (27, 55)


def choose_later(losses: dict[float, float]) -> Round:
    """The decision over factors with these mean losses; NaN: diverged."""
    policy = horizon(96)
    history = trained(policy).commits[11]
    plan = policy.plan(13, history)
    draw = np.random.default_rng(0)
    results = [
        result(c, (losses[c.multiplier] + draw.normal(0, 0.1, BLOCKS)).tolist())
        for c in plan.candidates
    ]
    return policy.choose(plan, results)


@pytest.mark.parametrize(
    ("losses", "factor"),
    [
        ({0.5: 1.0, 1.0: 1.0, 2.0: 1.0}, 1.0),
        ({0.5: 0.99, 1.0: 1.0, 2.0: 1.1}, 1.0),
        ({0.5: 0.9, 1.0: 1.0, 2.0: 1.1}, 0.5),
        ({0.5: 0.9, 1.0: 1.0, 2.0: 0.8}, 2.0),
        ({0.5: 1.2, 1.0: math.nan, 2.0: math.nan}, 0.5),
        ({0.5: 1.2, 1.0: 1.0, 2.0: math.nan}, 1.0),
    ],
)
def test_one_stays_unless_another_is_clearly_better(
    losses: dict[float, float], factor: float
) -> None:
    choice = choose_later(losses)
    assert choice.winner is not None
    assert choice.winner.candidate.multiplier == factor
    assert choice.next_base_lr == pytest.approx(choice.base_lr * factor)


def test_lost_later_rounds_are_repeated_lower_and_then_refused() -> None:
    policy = horizon(96)
    before = trained(policy).commits[11]
    history, peak = lost_rounds(policy, 13, 4, before), before[-1].next_base_lr
    tried = [choice.base_lr for choice in history[len(before) :]]
    assert tried == pytest.approx([peak, peak / 4, peak / 16, peak / 64])
    with pytest.raises(DivergedError, match="epoch 13.*: 0.101, 0.0252, "):
        policy.plan(13, history)


def test_a_later_round_after_a_lost_one_goes_on_from_its_rate() -> None:
    policy = horizon(96)
    history = lost_rounds(policy, 13, 1, trained(policy).commits[11])
    plan = policy.plan(13, history)
    choice = policy.choose(plan, [Surface().result(plan, c) for c in plan.candidates])
    assert choice.next_base_lr == pytest.approx(history[-2].next_base_lr / 4)
    assert len(policy.plan(13, (*history, choice)).lrs) == 125 - plan.kept_steps


# What the loss tells.


def rounds_with_losses(
    policy: HorizonStpt, surface: Surface, losses: Callable[[int], float]
) -> dict[int, str]:
    """Epochs with a later round, and why; `losses`: by epoch."""
    history, seen, why = (), (), {}
    for epoch in range(1, policy.epochs + 1):
        plan = policy.plan(epoch, history, seen)
        while plan.candidates:
            if epoch > 1:
                why[epoch] = plan.reason
            results = [surface.result(plan, candidate) for candidate in plan.candidates]
            history = (*history, policy.choose(plan, results))
            plan = policy.plan(epoch, history, seen)
        seen = (*seen, losses(epoch))
    return why


def falling(epoch: int) -> float:
    return 2 * 0.98**epoch


def test_steady_progress_is_no_reason_for_a_round() -> None:
    assert rounds_with_losses(horizon(96, rounds_at=[]), always(2.0), falling) == {}


def test_a_plateau_is_a_reason_for_a_round() -> None:
    policy = horizon(96, rounds_at=[])
    why = rounds_with_losses(policy, always(1.0), lambda epoch: falling(min(epoch, 20)))
    # Epochs 21 to 23 gained nothing; the round changed nothing, so there is no other.
    assert list(why) == [24]
    assert "stalled" in why[24]


def test_rounds_on_a_plateau_leave_each_other_time() -> None:
    policy = horizon(96, rounds_at=[])
    why = rounds_with_losses(policy, always(0.5), lambda epoch: falling(min(epoch, 20)))
    assert list(why)[:3] == [24, 28, 32]


def test_a_spike_is_a_reason_even_where_rounds_have_not_paid() -> None:
    policy = horizon(96)
    why = rounds_with_losses(
        policy, always(1.0), lambda epoch: falling(epoch) * (1.5 if epoch == 40 else 1)
    )
    assert list(why) == [13, 41]
    assert ("epochs are done" in why[13], "risen" in why[41]) == (True, True)


@pytest.mark.parametrize("budget", [0.15, 0.3])
def test_no_reason_is_worth_more_than_the_budget(budget: float) -> None:
    """A loss that rises every second epoch."""
    policy = horizon(32, budget=budget, rounds_at=[])
    opening = trained(policy).asked
    why = rounds_with_losses(policy, always(2.0), lambda epoch: 1.0 + (epoch % 2))
    later = [policy.plan(epoch, (Round(1, 0.1, (), None, 0.1, ""),), (1.0, 2.0)) for epoch in why]
    spent = sum(len(plan.candidates) * plan.pretrain_steps for plan in (*opening, *later))
    assert spent <= budget * 32 * 125
    assert why


# Weight decay.


def decays(plan: Plan) -> list[float]:
    return [candidate.decay for candidate in plan.candidates]


def decided_decay(losses: dict[float, float]) -> tuple[HorizonStpt, Plan, Round]:
    """The decision over factors of the weight decay with these mean losses; NaN: diverged."""
    policy = horizon(96, search_weight_decay=True)
    history: tuple[Round, ...] = ()
    plan = policy.plan(1, history)
    while plan.stage != "decay":
        history = (
            *history,
            policy.choose(plan, [Surface().result(plan, c) for c in plan.candidates]),
        )
        plan = policy.plan(1, history)
    draw = np.random.default_rng(0)
    results = [
        result(c, (losses[c.decay] + draw.normal(0, 0.1, BLOCKS)).tolist())
        for c in plan.candidates
    ]
    return policy, plan, policy.choose(plan, results)


def test_weight_decays_are_tried_with_the_peak_as_much_as_they_would_do_in_the_training() -> None:
    policy, plan, choice = decided_decay({0.1: 1.0, 1.0: 1.0, 10.0: 1.0})
    assert decays(plan) == [0.1, 1.0, 10.0]
    assert len(set(rates(plan))) == 1
    assert plan.decay_scale * plan.pretrain_steps == pytest.approx(96 * 125)
    assert choice.next_base_lr == rates(plan)[0]
    assert policy.plan(1, (*plan.earlier, choice)).lrs


@pytest.mark.parametrize(
    ("losses", "factor"),
    [
        ({0.1: 1.0, 1.0: 1.0, 10.0: 1.0}, 1.0),
        ({0.1: 0.5, 1.0: 1.0, 10.0: 1.0}, 0.1),
        ({0.1: 0.9, 1.0: 1.0, 10.0: 0.5}, 10.0),
        ({0.1: 1.2, 1.0: 1.0, 10.0: math.nan}, 1.0),
        ({0.1: 9.0, 1.0: math.nan, 10.0: math.nan}, 1.0),
    ],
)
def test_the_weight_decay_stays_unless_another_is_clearly_better(
    losses: dict[float, float], factor: float
) -> None:
    policy, plan, choice = decided_decay(losses)
    assert choice.next_decay == factor
    history = (*plan.earlier, choice)
    assert {policy.plan(epoch, history).decay for epoch in (1, 2, 96)} == {factor}
    later = policy.plan(13, history)
    assert later.stage == "later"
    assert set(decays(later)) == {factor}
    kept = policy.choose(later, [Surface().result(later, c) for c in later.candidates])
    assert kept.next_decay == factor


def test_no_weight_decay_is_tried_unless_asked_for_or_when_the_budget_is_spent() -> None:
    assert "decay" not in {plan.stage for plan in trained(horizon(96)).asked}
    policy = horizon(16, budget=0.14, search_weight_decay=True, rounds_at=[])
    training = trained(policy)
    assert "decay" not in {plan.stage for plan in training.asked}
    assert training.asked
    assert {plan.decay for plan in training.mains} == {1.0}


# Resuming.


def test_a_resumed_run_plans_what_the_whole_one_did() -> None:
    policy = horizon(32, budget=0.4)
    surface = Surface(noise=0.2, factor=lambda epoch: 2.0)
    whole = trained(policy, surface)
    assert whole.later
    for done in range(1, 32):
        history = pickle.loads(pickle.dumps(whole.commits[done - 1]))
        for epoch in range(done + 1, 33):
            before = [plan for plan in whole.plans if plan.epoch == epoch]
            assert policy.plan(epoch, history) == before[0]
            if len(before) > 1:
                break


def test_a_history_stays_small() -> None:
    """What only this epoch compares with is dropped with its decision, or summarised."""
    history = trained(horizon(), Surface()).commits[-1]
    assert history[-1].tried == ()
    assert history[-1].winner is not None
    assert history[-1].winner.val_losses == ()
    assert all(len(result.val_losses) <= 64 for choice in history for result in choice.tried)


def test_policy_and_plan_survive_a_pickle() -> None:
    policy = horizon()
    again: HorizonStpt = pickle.loads(pickle.dumps(policy))
    assert again.plan(1, ()) == pickle.loads(pickle.dumps(policy.plan(1, ())))
