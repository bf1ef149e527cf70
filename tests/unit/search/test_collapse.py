"""A training that collapsed starts again: when, how often, and at what rates."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from raytrain_opt.config.learning_rate import HorizonPolicy
from raytrain_opt.config.updates import OptimizerSection
from raytrain_opt.optim.epoch_steps import EpochSteps, Length
from raytrain_opt.search.collapse import Attempt, latest_attempt
from raytrain_opt.search.policy import (
    Candidate,
    CandidateResult,
    Decision,
    EpochLosses,
    History,
    StartAgain,
    TrainEpoch,
)
from raytrain_opt.search.stpt_horizon import HorizonStpt, TaskFacts

EPOCHS = 20
WINNER = CandidateResult(Candidate(0, 1.0, 0.1), "ok", 0.5, 2.1, 2.1, 8, 1.1, 0, 8)
SEARCHED = History((Decision(1, 0.1, WINNER, 0.1, "", untrained_loss=2.4),))


def train(history: History, *losses: float) -> Attempt:
    """Return the attempt after epochs with these losses; it restarts where it has to."""
    for epoch, loss in enumerate(losses):
        if latest_attempt(history, EPOCHS).number > len(history.restarts):
            history = history.after_restart(StartAgain(epoch + 1, ""))
        history = history.after_epoch(EpochLosses(loss))
    return latest_attempt(history, EPOCHS)


@pytest.mark.parametrize(
    ("losses", "start"),
    [
        ((2.2, 2.21), 2),  # after a tenth of the epochs
        ((2.2, 2.19, 2.19), 0),  # it learns, however little
        ((2.2, 2.1, 2.21), 3),
        ((2.2, 2.1, 2.1, 2.1, 2.21), 5),  # after a quarter
        ((2.2, 2.1, 2.1, 2.1, 2.1, 2.6), 0),  # too late
        ((-2.5, -2.51), 0),
        ((-2.5, -2.49), 2),
        ((0.6983, 0.6997), 0),  # nothing is left to learn
        ((2.3, math.nan), 2),
        ((math.inf,), 1),
        ((*[2.0] * 9, math.nan), 10),
        ((*[2.0] * 10, math.nan), 0),  # the second half
        ((2.2, 2.26, 2.2, 2.26), 4),  # a second attempt
        ((2.2, 2.26, 2.3, 2.28, 2.2, 2.2, 2.2), 2),
    ],
)
def test_a_collapse_is_seen_from_a_tenth_to_a_quarter_of_the_epochs(
    losses: tuple[float, ...], start: int
) -> None:
    assert train(SEARCHED, *losses).start == start


@pytest.mark.parametrize(("candidate_loss", "start"), [(1.14, 2), (1.16, 0)])
def test_a_training_that_is_worse_than_a_guess_collapsed_if_a_candidate_was_far_better(
    candidate_loss: float, start: int
) -> None:
    tried = (WINNER, replace(WINNER, val_loss=candidate_loss))
    decision = replace(SEARCHED.decisions[0], tried=tried)
    history = History((decision,), epoch_losses=(3.0, 2.32))
    assert latest_attempt(history, EPOCHS, guessing_loss=2.3).start == start
    assert latest_attempt(history, EPOCHS, guessing_loss=2.3, may_rise=True).start == 0


@pytest.mark.parametrize(("steps", "again"), [(3, False), (192, True)])
def test_a_guess_is_a_limit_after_twice_the_steps_of_candidates(steps: int, again: bool) -> None:
    section, facts = HorizonPolicy(policy="stpt_horizon"), TaskFacts(True, 0, 1e6, 2.3)
    policy = HorizonStpt(section, Length(EPOCHS), EpochSteps(steps), (OptimizerSection(),), facts)
    decision = replace(SEARCHED.decisions[0], tried=(replace(WINNER, val_loss=1.0),))
    action = policy.next(3, History((decision,), epoch_losses=(3.0, 2.32)))
    assert isinstance(action, StartAgain) is again


def test_a_training_starts_four_more_times_at_most() -> None:
    attempt = train(SEARCHED, *(math.nan,) * 6)
    assert (attempt.start, attempt.number) == (4, 4)
    assert attempt.lr_factor == pytest.approx(0.01)


def test_a_run_that_is_resumed_with_more_epochs_remembers_its_restarts() -> None:
    """Epoch 2 is none that a training of 100 epochs looks at."""
    history = replace(SEARCHED, epoch_losses=(2.2, 2.5, 2.3), restarts=(3,))
    assert latest_attempt(history, 100) == Attempt(start=2, number=1)


def test_an_attempt_knows_only_its_own_epochs() -> None:
    history = History((), (1.0, 2.0, 3.0, 4.0), ((2, 0.2), (4, 0.4)))
    own = Attempt(start=3, number=1).own(history)
    assert (own.epoch_losses, own.validation_losses) == ((4.0,), ((1, 0.4),))


def test_the_policy_trains_a_shorter_schedule_from_a_lower_peak() -> None:
    """Muon: the weight decay and the watch begin anew, too."""
    muon = OptimizerSection(name="Muon", args={"weight_decay": "auto"})
    section = HorizonPolicy(policy="stpt_horizon")
    facts = TaskFacts(validation_size=64)
    policy = HorizonStpt(section, Length(EPOCHS), EpochSteps(96), (muon,), facts)
    history, actions = SEARCHED, []
    for epoch in range(1, EPOCHS + 1):
        action = policy.next(epoch, history)
        if isinstance(action, StartAgain):
            assert action == StartAgain(
                3,
                "the training loss is 2.5, above the first epoch's 2.2: training starts again "
                "from the initial weights, linear decay from 0.0316",
            )
            history = history.after_restart(action)
            action = policy.next(epoch, history)
        assert isinstance(action, TrainEpoch)
        actions.append(action)
        loss = (2.2, 2.5)[epoch - 1] if epoch <= 2 else 1.8 - 0.05 * (epoch - 2)
        scored = 1.0 if action.scores else None
        history = history.after_epoch(EpochLosses(loss, scored))
    assert history.restarts == (3,)
    assert [a.epoch for a in actions if a.scores] == [2 + 4, 2 + 9]
    assert [a.steps.held_out for a in actions] == [64] * (2 + 9) + [0] * 9
    assert [a.steps.weight_decay_factor > 0 for a in actions] == [False, True, False] + [True] * 17
    shorter = replace(policy, length=Length(EPOCHS - 2))
    lrs = [lr * 10**0.5 for action in actions[2:] for lr in action.steps.lrs]
    expected = [lr for epoch in range(1, 19) for lr in lrs_of(shorter, epoch)]
    assert lrs == pytest.approx(expected)


def lrs_of(policy: HorizonStpt, epoch: int) -> tuple[float, ...]:
    action = policy.next(epoch, SEARCHED)
    assert isinstance(action, TrainEpoch)
    return action.steps.lrs


def test_a_training_for_a_time_does_not_start_again() -> None:
    policy = HorizonStpt(
        HorizonPolicy(policy="stpt_horizon"),
        Length(seconds=60.0),
        EpochSteps(96),
        (OptimizerSection(),),
    )
    assert policy.last_restart == 0
