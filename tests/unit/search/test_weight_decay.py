"""The weight decay that follows the fit and held-out samples: its formula, and in the policy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from raytrain_opt.config.learning_rate import HorizonPolicy
from raytrain_opt.config.updates import OptimizerSection
from raytrain_opt.optim.epoch_steps import EpochSteps, Length
from raytrain_opt.search.policy import (
    Candidate,
    CandidateResult,
    Decision,
    EpochLosses,
    History,
    TrainEpoch,
    TryCandidates,
)
from raytrain_opt.search.stpt_horizon import HorizonStpt, TaskFacts
from raytrain_opt.search.weight_decay import Watch, decay_by_fit

AUTO = OptimizerSection(name="Muon", args={"weight_decay": "auto"})


def result(lr: float, loss: float) -> CandidateResult:
    candidate = Candidate(0, 1.0, lr)
    return CandidateResult(candidate, "ok", 0.5, loss, loss, 8, 1.1, 0, 8)


WINNER = result(0.1, 1.5)
SEARCHED = History((Decision(1, 0.1, WINNER, 0.1, "", untrained_loss=2.0),))


@pytest.mark.parametrize(
    ("losses", "fit"),
    [((), 0.0), ((2.0,), 0.0), ((2.5,), 0.0), ((1.5, 1.0), 0.5), ((0.0,), 1.0), ((-1.0,), 1.0)],
)
def test_it_is_the_fit_of_the_last_epoch_in_times_of_the_training(
    losses: tuple[float, ...], fit: float
) -> None:
    """The loss of a network that hardly trained is 2."""
    history = replace(SEARCHED, epoch_losses=losses)
    assert decay_by_fit(history, sum_of_lrs=100.0, epochs=60) == pytest.approx(10 * fit / 100)


@pytest.mark.parametrize(
    ("sum_of_lrs", "epochs", "decay"),
    [(100, 16, 0.1), (100, 4, 0.025), (100, 60, 0.1), (3, 16, 0.6), (3, 4, 0.15)],
)
def test_short_trainings_repeat_samples_less_and_bear_less_decay(
    sum_of_lrs: float, epochs: float, decay: float
) -> None:
    history = replace(SEARCHED, epoch_losses=(1.0,))  # a fit of 0.5
    assert decay_by_fit(history, sum_of_lrs, epochs) == pytest.approx(0.5 * decay)


@pytest.mark.parametrize(("first", "latest", "decay"), [(4.0, 1.0, 0.075), (0.0, 0.0, 0.0)])
def test_without_a_search_the_fit_is_relative_to_a_positive_loss_of_the_first_epoch(
    first: float, latest: float, decay: float
) -> None:
    assert decay_by_fit(History((), (first, latest)), 100.0, 16) == pytest.approx(decay)


def policy(*optimizers: OptimizerSection) -> HorizonStpt:
    section = HorizonPolicy(policy="stpt_horizon")
    return HorizonStpt(section, Length(16), EpochSteps(96), optimizers)


def test_candidates_train_without_it_and_epochs_with_their_own() -> None:
    searching = policy(AUTO, OptimizerSection())
    factors: dict[int, set[float]] = {0: set(), 1: set()}
    history = History()
    while isinstance(action := searching.next(1, history), TryCandidates):
        for candidate in action.candidates:
            factors[candidate.optimizer].add(candidate.weight_decay_factor)
        results = [
            replace(result(c.lr, 2 - c.lr if c.lr < 1 else 3.0), candidate=c)
            for c in action.candidates
        ]
        history = history.after_round(searching.decide(action, results, history))
    assert factors == {0: {0.0}, 1: {1.0}}
    decays = []
    for epoch, loss in enumerate((1.6, 1.2, 0.4), start=1):
        action = searching.next(epoch, history)
        assert isinstance(action, TrainEpoch)
        assert action.steps.optimizer == 0
        decays.append(action.steps.weight_decay_factor)
        history = history.after_epoch(EpochLosses(loss))
    assert decays[0] == 0
    # The sum of all rates: 16 x 96 steps, half the peak in the mean.
    peak = history.decisions[-1].next_base_lr
    expected = [10 * (1 - loss / (2 - 0.01)) / (peak * 0.5 * 16 * 96) for loss in (1.6, 1.2)]
    assert decays[1:] == pytest.approx(expected, rel=0.01)


def test_a_weight_decay_that_is_a_number_stays() -> None:
    given = policy(OptimizerSection(name="Muon", args={"weight_decay": 0.03}))
    history = replace(SEARCHED, epoch_losses=(0.1,))
    action = given.next(2, history)
    assert isinstance(action, TrainEpoch)
    assert action.steps.weight_decay_factor == 1


@pytest.mark.parametrize(("epochs", "watch"), [(15, Watch(0, 0)), (17, Watch(4, 8))])
def test_trainings_of_16_epochs_or_more_are_watched(epochs: int, watch: Watch) -> None:
    assert Watch.of(epochs, channel_norm=True) == watch


@pytest.mark.parametrize(
    ("share", "channel_norm", "fit"),
    [
        (1.0, True, 0.5),
        (0.34, True, 0.5),
        (0.2, True, 0.8),
        (0.0, True, 2.0),
        (-3.0, True, 2.0),
        (-3.0, False, 1.0),
        (0.2, False, 0.5),
    ],
)
def test_a_network_that_memorizes_has_more_decay(
    share: float, channel_norm: bool, fit: float
) -> None:
    """`share`: what held-out samples gain, relative to the others, from epoch 1 to 2.

    The network that has hardly trained has a loss of 2, so the fit alone is 0.5.
    """
    history = replace(SEARCHED, epoch_losses=(1.6, 1.2, 1.0), validation_losses=((1, 1.7),))
    assert decay_by_fit(history, 100.0, 16, Watch(1, 2)) == pytest.approx(0.05)
    scored = replace(history, validation_losses=((1, 1.7), (2, 1.7 - 0.4 * share)))
    watch = Watch(1, 2, channel_norm)
    assert decay_by_fit(scored, 100.0, 16, watch) == pytest.approx(0.1 * fit)


@pytest.mark.parametrize(("validation", "fit"), [(1.5, 0.0), (1.7, 2.0)])
def test_a_task_of_the_users_own_has_decay_in_the_second_half_if_held_out_samples_do_not_gain(
    validation: float, fit: float
) -> None:
    history = replace(SEARCHED, epoch_losses=(1.0,), validation_losses=((1, 1.7),))
    decay = partial(decay_by_fit, sum_of_lrs=100.0, epochs=16, watch=Watch(1, 2), classifies=False)
    assert decay(history) == pytest.approx(0.1 * 0.5)
    scores = ((1, 1.7), (2, validation))
    halfway = replace(history, epoch_losses=(1.6, 1.2, 1.0), validation_losses=scores)
    assert decay(halfway) == pytest.approx(0.1 * fit)


def test_a_training_that_is_resumed_with_more_epochs_is_not_watched() -> None:
    """It was scored after epochs 4 and 8, as one of 16, and after 9, as one of 18."""
    scored = ((4, 1.7), (8, 1.7), (9, 1.7))
    losses = tuple(1.8 - 0.1 * epoch for epoch in range(9))
    history = replace(SEARCHED, epoch_losses=losses, validation_losses=scored)
    assert Watch(5, 9).falls(history) == (0, 0)


def test_losses_that_hardly_fall_say_nothing() -> None:
    history = replace(SEARCHED, epoch_losses=(1.0, 0.97), validation_losses=((1, 1.0), (2, 1.1)))
    assert decay_by_fit(history, 100.0, 16, Watch(1, 2)) == pytest.approx(0.1 * 0.515)


def test_the_first_half_holds_the_validation_split_out_and_scores_it_twice() -> None:
    watching = replace(policy(AUTO), facts=TaskFacts(validation_size=64))
    history, actions = SEARCHED, []
    for epoch in range(1, 17):
        action = watching.next(epoch, history)
        assert isinstance(action, TrainEpoch)
        actions.append(action)
        validation = 1.5 if action.scores else None
        history = history.after_epoch(EpochLosses(1.6 - 0.1 * epoch, validation))
    assert [action.steps.held_out for action in actions] == [64] * 8 + [0] * 8
    assert [action.epoch for action in actions if action.scores] == [4, 8]
    factors = [action.steps.weight_decay_factor for action in actions]
    assert factors[8] == factors[15] == pytest.approx(2 * 10 / (0.1 * 0.5 * 16 * 96), rel=0.01)
    assert factors[7] < factors[8] / 2
    [note] = {action.overfitting for action in actions if action.overfitting}
    assert actions[8].overfitting == note
    assert note == (
        "from epoch 4 to 8 the training loss fell by 0.4, that of held-out samples by 0: more "
        "weight decay"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"facts": TaskFacts()},
        {"length": Length(8)},
        {"length": Length(seconds=60.0)},
        {"optimizers": (OptimizerSection(name="Muon"),)},
    ],
)
def test_a_training_that_cannot_answer_holds_nothing_out(changes: dict[str, Any]) -> None:
    watching = replace(replace(policy(AUTO), facts=TaskFacts(validation_size=64)), **changes)
    history = SEARCHED.after_span(Length(16).span(1, EpochSteps(96), ()))
    action = watching.next(1, history)
    assert isinstance(action, TrainEpoch)
    assert (action.steps.held_out, action.scores) == (0, False)
