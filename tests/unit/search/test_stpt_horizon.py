"""stpt_horizon on simulated trainings: a loss surface of rate and steps, with noise."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytrain_opt.config.learning_rate import HorizonPolicy
from raytrain_opt.config.updates import OptimizerSection
from raytrain_opt.errors import DivergedError
from raytrain_opt.optim.epoch_steps import EpochSteps, Length
from raytrain_opt.optim.schedules import RelativeSchedule
from raytrain_opt.search.policy import (
    Candidate,
    CandidateResult,
    History,
    TrainEpoch,
    TryCandidates,
)
from raytrain_opt.search.stpt_horizon import HorizonStpt, TaskFacts
from tests.support.small_jobs import small_job

BLOCKS = 100
EMPTY = History()


def horizon(epochs: int = 16, steps: int = 125, ramp: Any = (), **section: Any) -> HorizonStpt:
    validated = HorizonPolicy.model_validate({"policy": "stpt_horizon", **section})
    return HorizonStpt(validated, Length(epochs), EpochSteps(steps, ramp), (OptimizerSection(),))


@dataclass
class Surface:
    """A training whose best rate is `best`, or lower with fewer than `unbiased_steps` steps.

    The loss grows with the square of the distance in decades. Each block of samples has a
    difficulty that is the same for all candidates, and `noise` that differs between rates.
    """

    best: float = 0.1
    diverges_from: float = math.inf
    noise: float = 0.05
    unbiased_steps: int = 1
    seed: int = 0

    def result(self, action: TryCandidates, candidate: Candidate) -> CandidateResult:
        noise = self._draw(f"{candidate.lr:.6g} {action.pretrain_steps}")
        blocks = self.loss(action, candidate) + self._draw("all") + self.noise * noise
        diverges = candidate.lr >= self.diverges_from
        return result(candidate, [math.nan] * BLOCKS if diverges else blocks.tolist())

    def _draw(self, key: str) -> Any:
        return np.random.default_rng(zlib.crc32(f"{self.seed} {key}".encode())).normal(size=BLOCKS)

    def loss(self, action: TryCandidates, candidate: Candidate) -> float:
        best = self.best * min(1.0, action.pretrain_steps / self.unbiased_steps)
        return 1 + math.log10(candidate.lr / best) ** 2


def result(candidate: Candidate, blocks: list[float]) -> CandidateResult:
    mean = sum(blocks) / len(blocks)
    return CandidateResult(
        candidate,
        "diverged" if math.isnan(mean) else "ok",
        val_metric=0.5,
        val_loss=mean,
        train_loss=mean,
        samples=8,
        duration_s=1.1,
        slot=0,
    )


@dataclass
class Training:
    """The driver's view of a training. `histories`: after each epoch."""

    actions: list[TryCandidates | TrainEpoch]
    histories: list[History]

    @property
    def rounds(self) -> list[TryCandidates]:
        return [action for action in self.actions if isinstance(action, TryCandidates)]

    @property
    def epochs(self) -> list[TrainEpoch]:
        return [action for action in self.actions if isinstance(action, TrainEpoch)]

    @property
    def peak(self) -> float:
        """The peak rate of epoch 1."""
        return self.histories[0].decisions[-1].next_base_lr

    def lrs(self) -> list[float]:
        """The rate of every step of the training."""
        return [lr for action in self.epochs for lr in action.steps.lrs]


def next_round(policy: HorizonStpt, epoch: int, history: History = EMPTY) -> TryCandidates:
    action = policy.next(epoch, history)
    assert isinstance(action, TryCandidates)
    return action


def trained(policy: HorizonStpt, surface: Surface | None = None) -> Training:
    """Train all epochs as the driver does, without losses of epochs."""
    surface, history = surface or Surface(), EMPTY
    actions: list[TryCandidates | TrainEpoch] = []
    histories = []
    for epoch in range(1, policy.length.known_epochs + 1):
        while isinstance(action := policy.next(epoch, history), TryCandidates):
            actions.append(action)
            results = [surface.result(action, candidate) for candidate in action.candidates]
            history = history.after_round(policy.decide(action, results, history))
        actions.append(action)
        histories.append(history)
    return Training(actions, histories)


def cost(training: Training, policy: HorizonStpt) -> float:
    """Return the search cost as a fraction of the training's samples."""
    epochs = sum(
        len(r.candidates) * r.pretrain_steps / policy.steps(r.epoch) for r in training.rounds
    )
    return epochs / policy.length.known_epochs


def rates(action: TryCandidates) -> list[float]:
    return [candidate.lr for candidate in action.candidates]


# The schedule.


def test_the_values_of_a_small_schedule() -> None:
    """Linear: 2 of 10 steps warm up, the middle of each step counts."""
    schedule = RelativeSchedule("linear", 0.2)
    assert schedule.compressed(10) == pytest.approx(
        [0.25, 0.75, *(part / 16 for part in (15, 13, 11, 9, 7, 5, 3, 1))]
    )
    assert [schedule.at(done) for done in (0.0, 0.1, 0.2, 0.6, 1.0)] == pytest.approx(
        [0, 0.5, 1, 0.5, 0]
    )


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_compressed_it_has_the_same_mean_and_the_same_values(shape: Any) -> None:
    schedule = RelativeSchedule(shape, 0.1)
    short, long = schedule.compressed(20), schedule.compressed(2000)
    assert sum(short) / 20 == pytest.approx(sum(long) / 2000, abs=1e-3)
    assert long[50::100] == pytest.approx(short, abs=0.01)
    assert max(long) == pytest.approx(1, abs=0.01)
    assert 0 < long[-1] < 1e-3


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_a_training_covers_the_full_schedule_at_the_chosen_peak(shape: Any) -> None:
    policy = horizon(epochs=5, steps=80, shape=shape, warmup_fraction=0.2)
    training = trained(policy)
    expected = [training.peak * part for part in RelativeSchedule(shape, 0.2).compressed(400)]
    assert training.lrs() == pytest.approx(expected)
    assert training.lrs()[-1] < 0.01 * training.peak


@pytest.mark.parametrize(("optimizer", "warmup"), [("SGD", 0.1), ("LARS", 0.2)])
def test_the_rate_of_lars_rises_longer_unless_the_job_says_how_long(
    optimizer: str, warmup: float
) -> None:
    named = (OptimizerSection.model_validate({"name": optimizer}),)
    policy = replace(horizon(), optimizers=named)
    assert policy.schedule(0) == RelativeSchedule("linear", warmup)
    given = replace(horizon(warmup_fraction=0.3), optimizers=named)
    assert given.schedule(0) == RelativeSchedule("linear", 0.3)


def test_epochs_with_fewer_and_larger_batches_cover_the_same_part_of_it() -> None:
    policy = horizon(epochs=4, steps=100, ramp=((3, 50),))
    training = trained(policy)
    assert [len(action.steps.lrs) for action in training.epochs] == [100, 100, 50, 50]
    peak, schedule = training.peak, policy.schedule(0)
    third, fourth = training.epochs[2].steps.lrs, training.epochs[3].steps.lrs
    assert third[0] == pytest.approx(peak * schedule.at(0.5 + 0.25 / 100))
    assert fourth[-1] == pytest.approx(peak * schedule.at(1 - 0.25 / 100))


# The first grid.


def test_the_first_round_tries_full_schedules_a_decade_apart() -> None:
    action = next_round(horizon(initial=0.1), 1)
    assert rates(action) == pytest.approx([0.01, 0.1, 1.0])
    assert [c.multiplier for c in action.candidates] == pytest.approx([0.1, 1, 10])
    assert action.lr_shape == horizon().schedule(0).compressed(19)
    assert action.kept_steps == 0


def test_the_second_round_tries_longer_schedules_to_both_sides_of_the_best() -> None:
    training = trained(horizon(initial=0.1), Surface(0.08))
    coarse, fine = training.rounds
    assert (coarse.stage, fine.stage) == ("coarse", "fine")
    assert rates(fine) == pytest.approx([0.0316, 0.1, 0.316], rel=0.01)
    assert (coarse.pretrain_steps, fine.pretrain_steps) == (19, 76)
    assert fine.lr_shape == horizon().schedule(0).compressed(76)


@pytest.mark.parametrize(("steps", "expected"), [(60, 96), (120, 96), (240, 120), (40, 92)])
def test_candidates_have_at_least_96_steps_where_the_budget_has_them(
    steps: int, expected: int
) -> None:
    """Half an epoch of 120 steps is 60: with so few, single rates are unreliable."""
    fine = trained(horizon(60, steps)).rounds[-1]
    assert (fine.stage, fine.pretrain_steps) == ("fine", expected)


# The peak.


@pytest.mark.parametrize("best", [0.003, 0.02, 0.06, 0.1, 0.3, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_peak_is_near_the_best(best: float, seed: int) -> None:
    training = trained(horizon(), Surface(best, noise=0.1, seed=seed))
    assert 0.5 < training.peak / best < 2


@dataclass
class ScriptedLosses(Surface):
    """Coarse candidates have the losses 4, 3.5 and 9; those of the fine ones are arguments.

    All others have the loss 4.
    """

    noise: float = 0.0
    fine: tuple[float, ...] = ()

    def loss(self, action: TryCandidates, candidate: Candidate) -> float:
        losses = {"coarse": (4.0, 3.5, 9.0), "fine": self.fine}
        lowest = -1.0 if action.stage == "coarse" else -0.5
        position = (math.log10(candidate.lr / 0.1) - lowest) / -lowest
        given = dict(enumerate(losses[action.stage]))
        return given.get(round(position), 4.0)


def test_the_peak_is_the_mean_log_rate_weighted_by_the_fourth_power_of_gains() -> None:
    """By hand: gains over 4 are 1, 2, 1 at -1.5, -1, -0.5: weighted 1, 16, 1 that is -1. With 2
    at -0.5 too, weighted 1, 16, 16: -25.5 / 33. The usual rate, -1, counts as 8 steps beside 76.
    """
    assert trained(horizon(), ScriptedLosses(fine=(3, 2, 3))).peak == pytest.approx(0.1)
    training = trained(horizon(), ScriptedLosses(fine=(3, 2, 2)))
    assert training.peak == pytest.approx(10 ** ((-25.5 / 33 * 76 - 8) / 84))
    decided = training.histories[0].decisions[-1]
    assert "weighted mean of the rates that reduce the loss" in decided.reason
    assert decided.winner is not None
    assert decided.winner.candidate.lr == pytest.approx(0.1)


def test_networks_that_do_not_normalize_channels_train_at_half_of_that() -> None:
    """The usual rate, 0.1, is that of 100 updates, and falls with the root of their number."""
    training = trained(
        replace(horizon(), facts=TaskFacts(channel_norm=False)), ScriptedLosses(fine=(3, 2, 3))
    )
    usual = 0.1 * math.sqrt(100 / (16 * 125))
    drawn = (76 * math.log10(0.05) + 8 * math.log10(usual)) / 84
    assert training.peak == pytest.approx(10**drawn)
    assert "0.5 x the weighted mean" in training.histories[0].decisions[-1].reason


@pytest.mark.parametrize(
    ("optimizer", "weights", "initial", "peak"),
    [
        ("SGD", None, None, 0.1),
        ("AdamW", None, None, 0.003),
        ("AdamW", "runs/a", None, 0.0003),
        ("AdamW", None, 0.1, 0.1),
        ("my.optimizers:Mine", None, None, 0.1),
    ],
)
@pytest.mark.parametrize("channel_norm", [True, False])
def test_the_usual_rate_trains_where_no_candidate_learned(
    optimizer: str, weights: str | None, initial: float | None, peak: float, channel_norm: bool
) -> None:
    model = {"name": "small_cnn", "weights": weights}
    section = {"policy": "stpt_horizon", "initial": initial}
    job = small_job(Path(), model=model, optimizer=optimizer, learning_rate=section)
    policy = replace(
        horizon(initial=initial),
        optimizers=job.optimizers,
        facts=TaskFacts(channel_norm=channel_norm, initial_lr=job.initial_lr),
    )
    if initial is None and not channel_norm:
        peak *= math.sqrt(100 / (16 * 125))
    training = trained(policy, ScriptedLosses(fine=(4.3, 3.97, 4.5)))
    assert training.peak == pytest.approx(peak)
    assert training.histories[0].decisions[-1].reason.startswith("not decided: ")


@pytest.mark.parametrize(
    ("optimizer", "log_peak"),
    [
        ("ScheduleFreeAdamW", (76 * -1.5 + 8 * math.log10(0.0025)) / 84),
        ("SGD", -1.5),  # the usual rate is higher
        ("my.optimizers:Mine", -1.5),  # nobody knows one
    ],
)
def test_a_lower_usual_rate_counts_as_eight_steps(optimizer: str, log_peak: float) -> None:
    """Candidates of 76 steps are best at 10^-1.5."""
    section = OptimizerSection.model_validate({"name": optimizer})
    policy = replace(horizon(initial=0.09), optimizers=(section,))
    training = trained(policy, ScriptedLosses(fine=(3.0, 4.0, 4.1)))
    assert math.log10(training.peak) == pytest.approx(log_peak, abs=0.001)
    is_drawn = "drawn by 10% to the usual" in training.histories[0].decisions[-1].reason
    assert is_drawn == (log_peak != -1.5)


@dataclass
class WorseAbove(Surface):
    """The coarse candidate at 1 is worse than that at 0.1 by this fraction."""

    worse: float = 0.0
    diverges_from: float = 9

    def loss(self, action: TryCandidates, candidate: Candidate) -> float:
        losses = {-2: 4.5, -1: 4.0, 0: 4.0 * (1 + self.worse), 1: 9.0}
        if action.stage == "coarse":
            return losses[round(math.log10(candidate.lr))]
        return super().loss(action, candidate)


@pytest.mark.parametrize(("worse", "center"), [(0.015, 1.0), (0.025, 0.1)])
def test_few_steps_favor_small_rates_so_2_percent_are_allowed_for(
    worse: float, center: float
) -> None:
    rounds = trained(horizon(), WorseAbove(worse=worse, noise=0.0)).rounds
    fine = next(action for action in rounds if action.stage == "fine")
    assert rates(fine) == pytest.approx([center / 10**0.5, center, center * 10**0.5])


@pytest.mark.parametrize("wrong_by", [0.01, 1.0, 100.0])
@pytest.mark.parametrize(
    ("epochs", "steps"), [(4, 125), (4, 2500), (16, 32), (16, 125), (16, 2500), (90, 32)]
)
def test_a_start_that_is_wrong_by_100_ends_at_the_same_peak(
    wrong_by: float, epochs: int, steps: int
) -> None:
    def peak(initial: float) -> float:
        policy = horizon(epochs, steps, initial=initial)
        return trained(policy, Surface(0.15, diverges_from=30)).peak

    assert peak(0.1 * wrong_by) == pytest.approx(peak(0.1))


@pytest.mark.parametrize("best", [3e-4, 50.0])
def test_the_grid_is_extended_past_the_edge_where_the_best_is(best: float) -> None:
    training = trained(horizon(), Surface(best))
    first, *more = training.rounds
    assert all(len(action.candidates) == 1 for action in more if action.stage == "coarse")
    assert len(first.candidates) == 3
    assert "edge" in training.histories[0].decisions[0].reason
    assert 0.5 < training.peak / best < 2


def test_the_fine_grid_is_extended_upward_even_if_a_coarse_rate_there_was_worse() -> None:
    """Few steps favor small rates."""
    training = trained(horizon(), ScriptedLosses(fine=(3, 2.5, 2)))
    first, second = (action for action in training.rounds if action.stage == "fine")
    assert rates(first) == pytest.approx([0.0316, 0.1, 0.316], rel=0.01)
    assert rates(second) == pytest.approx([1.0])


class Separable(Surface):
    """A few samples that large rates fit exactly, however large they are."""

    def result(self, action: TryCandidates, candidate: Candidate) -> CandidateResult:
        loss = self.best / candidate.lr if candidate.lr > 0.5 else 1.0
        return result(candidate, [loss - (candidate.lr > self.diverges_from)] * BLOCKS)


def test_negative_losses_do_not_end_at_0() -> None:
    assert trained(horizon(), Separable(0.005, 2)).peak > 2


@pytest.mark.parametrize("left", [0.0, 0.005])
def test_of_rates_that_learn_everything_the_smallest_is_the_peak(left: float) -> None:
    """Larger rates have smaller losses, of less than a hundredth of an untrained network's."""
    training = trained(horizon(), Separable(left))
    assert max(lr for action in training.rounds for lr in rates(action)) <= 4
    assert 0.5 < training.peak < 1.1
    reason = training.histories[-1].decisions[-1].reason
    assert "smallest rate that learns all there is, 1, drawn by 10% to the usual rate" in reason


# Divergence.


def test_diverging_rates_are_neither_chosen_nor_tried_in_the_fine_stage() -> None:
    training = trained(horizon(), Surface(0.2, diverges_from=0.6))
    assert training.peak < 0.6
    # The coarse stage did not try 0.562; 1 diverged in it.
    assert all(max(rates(action)) < 0.9 for action in training.rounds if action.stage == "fine")


def test_when_all_diverge_lower_rates_are_tried() -> None:
    training = trained(horizon(initial=1e4), Surface(0.1, diverges_from=0.5))
    action, diverged = training.rounds[0], training.histories[0].decisions[0]
    assert (diverged.winner, {*map(action.score_of, diverged.tried)}) == (None, {-math.inf})
    assert 0.05 < training.peak < 0.5


def test_when_all_diverge_again_and_again_the_error_lists_the_rates() -> None:
    policy, surface = horizon(), Surface(diverges_from=0.0)
    with pytest.raises(
        DivergedError, match=r"epoch 1.*: 1e-10, 1e-09, .*, 0\.1, .*learning_rate\.initial"
    ):
        trained(policy, surface)


# The budget.


@pytest.mark.parametrize(
    ("epochs", "steps"),
    [(1, 1), (1, 5000), (4, 1), (4, 32), (4, 125), (4, 5000), (16, 7), (16, 32), (16, 125)]
    + [(16, 1000), (90, 1), (90, 7), (90, 32), (90, 125)],
)
@pytest.mark.parametrize(
    ("section", "noise"),
    [({}, 0.01), ({}, 1.0), ({"max_search_cost": 0.05, "initial": 1e-3}, 0.01)],
)
def test_the_budget_is_kept(
    epochs: int, steps: int, section: dict[str, Any], noise: float
) -> None:
    policy = horizon(epochs, steps, **section)
    training = trained(policy, Surface(noise=noise))
    assert cost(training, policy) <= section.get("max_search_cost", 0.2)


@pytest.mark.parametrize(
    ("epochs", "steps", "step_flops", "limit"),
    [
        (12, 30, 1e6, 300),
        (12, 30, 1e12, 100),
        (12, 30, 1e13, 72),  # a fifth, where updates are slow
        (50, 30, 1e6, 300),
        (51, 30, 1e6, 306),
        (90, 125, 1e6, 2250),
        (2, 20, 1e6, 40),  # no more than one training
    ],
)
def test_a_small_training_may_spend_more_on_its_search(
    epochs: int, steps: int, step_flops: float, limit: int
) -> None:
    policy = replace(horizon(epochs, steps), facts=TaskFacts(step_flops=step_flops))
    assert policy.budgets(EMPTY)[0] == pytest.approx(limit)
    fixed = replace(policy, section=policy.section.model_copy(update={"max_search_cost": 0.1}))
    assert fixed.budgets(EMPTY) == [pytest.approx(0.1 * epochs * steps)]


@pytest.mark.parametrize(("epochs", "steps"), [(2, 20), (10, 16), (40, 4)])
def test_a_training_that_is_too_short_for_any_search_uses_the_initial_rate(
    epochs: int, steps: int
) -> None:
    training = trained(horizon(epochs, steps, initial=0.07))
    assert not training.rounds
    assert max(training.lrs()) == pytest.approx(0.07, rel=0.2)
    assert "too few steps for a search" in training.actions[0].reason


# Resuming.
