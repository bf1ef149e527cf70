"""The algorithm on a scripted run: its moves, their order and their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from raytrain_opt.config.schema import Job
from raytrain_opt.driver import train
from raytrain_opt.optim.epoch_steps import EpochSteps, length_of
from raytrain_opt.search.factory import build_policy
from raytrain_opt.search.policy import (
    Candidate,
    CandidateResult,
    Decision,
    EpochLosses,
    History,
    StartAgain,
    TrainEpoch,
    TryCandidates,
)

STEPS = 10


# The accuracy for a learning rate; None: training at it diverges.
Accuracy = Callable[[float], float | None]


def best_near(lr: float) -> Accuracy:
    """Return an accuracy that falls with the distance from this rate, in factors."""
    return lambda other: 1 / (1 + abs(math.log(other / lr)))


BEST_NEAR_A_TENTH = best_near(0.1)


class Move(NamedTuple):
    """One call of the driver and its arguments."""

    name: str
    epoch: int = 0
    state: str = ""
    lrs: tuple[float, ...] = ()


class ScriptedRun:
    """A `driver.Run` that computes nothing; a state is the text of its history."""

    def __init__(self, job: Job, accuracy: Accuracy) -> None:
        self.policy, self.accuracy = build_policy(job, length_of(job), EpochSteps(STEPS)), accuracy
        self.history, self.epochs_left = History(), range(1, job.epochs + 1)
        self.moves: list[Move] = []

    def initial_state(self) -> str:
        self.moves.append(Move("initial_state"))
        return "s"

    def estimate_length(self, state: str, history: History) -> History:
        return history

    def pretrain(self, state: str, action: TryCandidates) -> list[CandidateResult]:
        lrs = tuple(candidate.lr for candidate in action.candidates)
        self.moves.append(Move("pretrain", action.epoch, state, lrs))
        return [self._result(candidate) for candidate in action.candidates]

    def _result(self, candidate: Candidate) -> CandidateResult:
        reached = self.accuracy(candidate.lr)
        status, accuracy = ("diverged", math.nan) if reached is None else ("ok", reached)
        return CandidateResult(candidate, status, accuracy, -accuracy, 1.0, 8, 1.1, slot=0)

    def state_after(self, state: str, action: TryCandidates, decision: Decision) -> str:
        if decision.winner is None:
            self.moves.append(Move("no winner", action.epoch, lrs=(action.base_lr,)))
            return state
        lr = decision.winner.candidate.lr
        self.moves.append(Move("state_after", action.epoch, state, (lr,)))
        return f"{state} {action.epoch}:pre@{lr:g}x{action.kept_steps}"

    def start_again(self, action: StartAgain) -> str:
        raise NotImplementedError

    def train_epoch(self, state: str, action: TrainEpoch) -> tuple[str, EpochLosses]:
        lrs = action.steps.lrs
        self.moves.append(Move("train_epoch", action.epoch, state, lrs))
        rate = f"@{lrs[0]:g}" if lrs else ""
        return f"{state} {action.epoch}:main{rate}x{len(lrs)}", EpochLosses(1 / action.epoch)

    def evaluate(self, state: str, epoch: int) -> None:
        self.moves.append(Move("evaluate", epoch, state))

    def checkpoint_epoch(self, state: str, history: History) -> None:
        self.moves.append(Move("checkpoint_epoch", len(history.epoch_losses), state))

    def checkpoint_search(self, state: str, history: History) -> None:
        self.moves.append(Move("checkpoint_search", history.decisions[-1].epoch, state))

    def named(self, name: str) -> list[Move]:
        return [move for move in self.moves if move.name == name]


def trained(
    accuracy: Accuracy = BEST_NEAR_A_TENTH, epochs: int = 1, **learning_rate: Any
) -> ScriptedRun:
    """Return a finished run."""
    section = {"policy": "stpt", "candidates": [2.0, 1.0, 0.5], "alpha": 3, **learning_rate}
    values = {"model": "small_cnn", "data": "digits", "epochs": epochs, "global_batch_size": 8}
    run = ScriptedRun(Job.model_validate({**values, "learning_rate": section}), accuracy)
    train(run)
    return run


def test_an_epoch_is_the_published_sequence_of_moves() -> None:
    run = trained(best_near(0.2), initial=0.1)
    after_pretraining, after_training = "s 1:pre@0.2x3", "s 1:pre@0.2x3 1:main@0.2x7"
    assert run.moves == [
        Move("initial_state"),
        Move("pretrain", 1, "s", (0.2, 0.1, 0.05)),
        Move("state_after", 1, "s", (0.2,)),
        Move("checkpoint_search", 1, after_pretraining),
        Move("train_epoch", 1, after_pretraining, (0.2,) * 7),
        Move("evaluate", 1, after_training),
        Move("checkpoint_epoch", 1, after_training),
    ]


def test_a_diverged_round_is_repeated_at_half_the_rate_from_the_same_state() -> None:
    def accuracy(lr: float) -> float | None:
        return None if lr > 0.15 else best_near(0.1)(lr)

    run = trained(accuracy, initial=0.8)
    assert [(m.name, m.state, m.lrs) for m in run.moves[1:9]] == [
        ("pretrain", "s", (1.6, 0.8, 0.4)),
        ("no winner", "", (0.8,)),
        ("checkpoint_search", "s", ()),
        ("pretrain", "s", (0.8, 0.4, 0.2)),
        ("no winner", "", (0.4,)),
        ("checkpoint_search", "s", ()),
        ("pretrain", "s", (0.4, 0.2, 0.1)),
        ("state_after", "s", (0.1,)),
    ]


@pytest.mark.parametrize("alpha", [1.0, STEPS])
def test_pre_training_may_be_as_long_as_the_epoch(alpha: float) -> None:
    run = trained(best_near(0.2), epochs=2, initial=0.1, alpha=alpha)
    assert [move.lrs for move in run.named("train_epoch")] == [(), ()]
    assert run.named("checkpoint_epoch")[0].state == "s 1:pre@0.2x10 1:mainx0"
