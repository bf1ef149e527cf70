"""The algorithm on a scripted run: its moves, their order and their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from raytrain_opt.config.schema import Job
from raytrain_opt.driver import train
from raytrain_opt.errors import DivergedError
from raytrain_opt.optim.epoch_steps import EpochSteps
from raytrain_opt.results import Steps
from raytrain_opt.search.factory import build_policy
from raytrain_opt.search.fixed_schedule import RecordedEpoch, RecordedSchedule
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


class Checkpoint(NamedTuple):
    """The start of a resumed run, and the number of moves before it."""

    next_epoch: int = 1
    history: History = History()
    state: str = "s"
    moves: int = 1


START = Checkpoint()


class ScriptedRun:
    """A `driver.Run` that computes nothing; a state is the text of its history."""

    def __init__(self, job: Job, accuracy: Accuracy, checkpoint: Checkpoint = START) -> None:
        self.job, self.policy = job, build_policy(job, EpochSteps(STEPS))
        self.accuracy, self.checkpoint = accuracy, checkpoint
        self.moves: list[Move] = []
        self.checkpoints: list[Checkpoint] = []

    @property
    def history(self) -> History:
        return self.checkpoint.history

    @property
    def epochs_left(self) -> range:
        return range(self.checkpoint.next_epoch, self.job.epochs + 1)

    def initial_state(self) -> str:
        self.moves.append(Move("initial_state"))
        return self.checkpoint.state

    def plan(self, state: str, history: History) -> History:
        return history

    def pretrain(self, state: str, action: TryCandidates) -> list[CandidateResult]:
        lrs = tuple(candidate.lr for candidate in action.candidates)
        self.moves.append(Move("pretrain", action.epoch, state, lrs))
        return [self._result(candidate) for candidate in action.candidates]

    def _result(self, candidate: Candidate) -> CandidateResult:
        reached = self.accuracy(candidate.lr)
        status, accuracy = ("diverged", math.nan) if reached is None else ("ok", reached)
        return CandidateResult(candidate, status, accuracy, -accuracy, 1.0, 8, 1.0, 0.1, slot=0)

    def state_after(self, state: str, action: TryCandidates, decision: Decision) -> str:
        if decision.winner is None:
            self.moves.append(Move("no winner", action.epoch, lrs=(action.base_lr,)))
            return state
        if not action.keeps_winner:
            self.moves.append(Move("decided", action.epoch, state, (decision.next_base_lr,)))
            return state
        lr = decision.winner.candidate.lr
        self.moves.append(Move("state_after", action.epoch, state, (lr,)))
        return f"{state} {action.epoch}:pre@{lr:g}x{action.kept_steps}"

    def start_again(self, action: StartAgain, history: History) -> str:
        self.moves.append(Move("start_again", action.epoch))
        assert history.restarts[-1] == action.epoch
        return "s"

    def train_epoch(self, state: str, action: TrainEpoch) -> tuple[str, EpochLosses]:
        lrs = action.steps.lrs
        self.moves.append(Move("train_epoch", action.epoch, state, lrs))
        rate = f"@{lrs[0]:g}" if lrs else ""
        return f"{state} {action.epoch}:main{rate}x{len(lrs)}", EpochLosses(1 / action.epoch)

    def evaluate(self, state: str, epoch: int) -> None:
        self.moves.append(Move("evaluate", epoch, state))

    def checkpoint_epoch(self, state: str, history: History) -> None:
        epoch = len(history.epoch_losses)
        self.moves.append(Move("checkpoint_epoch", epoch, state))
        self.checkpoints.append(Checkpoint(epoch + 1, history, state, len(self.moves)))

    def checkpoint_round(self, state: str, history: History) -> None:
        epoch = history.decisions[-1].epoch
        self.moves.append(Move("checkpoint_round", epoch, state))
        self.checkpoints.append(Checkpoint(epoch, history, state, len(self.moves)))

    @property
    def histories(self) -> list[tuple[Decision, ...]]:
        """The decisions so far after each epoch."""
        after = [self.moves[checkpoint.moves - 1].name for checkpoint in self.checkpoints]
        pairs = zip(after, self.checkpoints, strict=True)
        return [
            checkpoint.history.decisions
            for name, checkpoint in pairs
            if name == "checkpoint_epoch"
        ]

    def named(self, name: str) -> list[Move]:
        return [move for move in self.moves if move.name == name]


def trained(
    accuracy: Accuracy = BEST_NEAR_A_TENTH,
    epochs: int = 1,
    checkpoint: Checkpoint = START,
    **learning_rate: Any,
) -> ScriptedRun:
    """Return a finished run, started from the checkpoint."""
    run = prepared(accuracy, epochs, checkpoint, **learning_rate)
    train(run)
    return run


def prepared(
    accuracy: Accuracy, epochs: int, checkpoint: Checkpoint = START, **learning_rate: Any
) -> ScriptedRun:
    section = {"policy": "stpt", "candidates": [2.0, 1.0, 0.5], "alpha": 3, **learning_rate}
    if section["policy"] != "stpt":
        section = learning_rate
    values = {"model": "small_cnn", "data": "digits", "epochs": epochs, "global_batch_size": 8}
    return ScriptedRun(
        Job.model_validate({**values, "learning_rate": section}), accuracy, checkpoint
    )


def test_an_epoch_is_the_published_sequence_of_moves() -> None:
    run = trained(best_near(0.2), initial=0.1)
    after_pretraining, after_training = "s 1:pre@0.2x3", "s 1:pre@0.2x3 1:main@0.2x7"
    assert run.moves == [
        Move("initial_state"),
        Move("pretrain", 1, "s", (0.2, 0.1, 0.05)),
        Move("state_after", 1, "s", (0.2,)),
        Move("checkpoint_round", 1, after_pretraining),
        Move("train_epoch", 1, after_pretraining, (0.2,) * 7),
        Move("evaluate", 1, after_training),
        Move("checkpoint_epoch", 1, after_training),
    ]


def test_the_next_epoch_starts_from_the_main_trainings_state_at_the_winners_rate() -> None:
    run = trained(best_near(0.8), epochs=3, initial=0.1)
    assert run.named("pretrain") == [
        Move("pretrain", 1, "s", (0.2, 0.1, 0.05)),
        Move("pretrain", 2, "s 1:pre@0.2x3 1:main@0.2x7", (0.4, 0.2, 0.1)),
        Move("pretrain", 3, run.named("checkpoint_epoch")[1].state, (0.8, 0.4, 0.2)),
    ]
    assert [len(history) for history in run.histories] == [1, 2, 3]


def test_warm_up_epochs_have_no_round() -> None:
    warmup = {"epochs": 2, "lr": 0.01, "shape": "constant"}
    run = trained(epochs=3, initial=0.1, warmup=warmup)
    names = [(move.name, move.epoch) for move in run.moves[1:]]
    assert names == [
        ("train_epoch", 1),
        ("evaluate", 1),
        ("checkpoint_epoch", 1),
        ("train_epoch", 2),
        ("evaluate", 2),
        ("checkpoint_epoch", 2),
        ("pretrain", 3),
        ("state_after", 3),
        ("checkpoint_round", 3),
        ("train_epoch", 3),
        ("evaluate", 3),
        ("checkpoint_epoch", 3),
    ]
    assert [move.lrs for move in run.named("train_epoch")[:2]] == [(0.01,) * STEPS] * 2
    assert [len(history) for history in run.histories] == [0, 0, 1]


def test_a_schedule_trains_all_steps_at_its_rates() -> None:
    run = trained(epochs=2, policy="schedule", shape="linear", initial=0.2)
    assert not run.named("pretrain")
    first, second = (move.lrs for move in run.named("train_epoch"))
    assert (*first, *second) == pytest.approx([0.2 * (1 - step / 20) for step in range(20)])


def test_a_diverged_round_is_repeated_at_half_the_rate_from_the_same_state() -> None:
    def accuracy(lr: float) -> float | None:
        return None if lr > 0.15 else best_near(0.1)(lr)

    run = trained(accuracy, initial=0.8)
    assert [(m.name, m.state, m.lrs) for m in run.moves[1:9]] == [
        ("pretrain", "s", (1.6, 0.8, 0.4)),
        ("no winner", "", (0.8,)),
        ("checkpoint_round", "s", ()),
        ("pretrain", "s", (0.8, 0.4, 0.2)),
        ("no winner", "", (0.4,)),
        ("checkpoint_round", "s", ()),
        ("pretrain", "s", (0.4, 0.2, 0.1)),
        ("state_after", "s", (0.1,)),
    ]
    [history] = run.histories
    assert [decision.winner is None for decision in history] == [True, True, False]
    assert history[-1].next_base_lr == 0.1


def test_when_every_round_diverges_the_error_lists_the_rates() -> None:
    run = prepared(lambda _: None, epochs=2, initial=0.8)
    rates = ", ".join(f"{0.8 / 2**i:.4g}" for i in range(6))
    with pytest.raises(DivergedError, match=rf"epoch 1: .*: {rates} \("):
        train(run)
    assert len(run.named("pretrain")) == len(run.named("no winner")) == 6
    assert not run.named("train_epoch")
    assert not run.named("checkpoint_epoch")


def test_a_single_candidate_trains_all_steps_without_a_round() -> None:
    run = trained(epochs=2, initial=0.3, candidates=[1.0])
    assert run.named("pretrain") == []
    assert {move.lrs for move in run.named("train_epoch")} == {(0.3,) * STEPS}


@pytest.mark.parametrize("alpha", [1.0, STEPS])
def test_pre_training_may_be_as_long_as_the_epoch(alpha: float) -> None:
    run = trained(best_near(0.2), epochs=2, initial=0.1, alpha=alpha)
    assert [move.lrs for move in run.named("train_epoch")] == [(), ()]
    assert run.named("checkpoint_epoch")[0].state == "s 1:pre@0.2x10 1:mainx0"


def test_a_peak_search_keeps_no_state() -> None:
    run = trained(best_near(0.3), epochs=64, policy="stpt_horizon", horizon=1.0)
    moves = [move for move in run.moves[1:] if move.name != "checkpoint_round"]
    first = [move for move in moves if move.epoch == 1]
    *rounds, decided, training, _, _ = first
    assert {(move.name, move.state) for move in rounds[::2]} == {("pretrain", "s")}
    assert {move.name for move in rounds[1::2]} == {"no winner"}
    assert decided == Move("decided", 1, "s", decided.lrs)
    # 0.3, drawn to 0.1 by 8 / (10 + 8).
    assert decided.lrs[0] == pytest.approx(0.18, rel=0.05)
    assert (training.state, len(training.lrs)) == ("s", STEPS)
    assert {move.epoch for move in run.named("pretrain")} == {1}
    assert run.named("state_after") == []


def diverges_above(limit: float) -> Accuracy:
    return lambda lr: None if lr > limit else best_near(0.8)(lr)


@pytest.mark.parametrize(
    ("accuracy", "epochs", "learning_rate", "rounds"),
    [
        # Rounds diverge in epoch 1; the halved rate stays in force.
        (diverges_above(0.5), 5, {"initial": 4.0}, 7),
        (best_near(0.3), 64, {"policy": "stpt_horizon", "horizon": 1.0}, 3),
        (BEST_NEAR_A_TENTH, 3, {"policy": "schedule", "shape": "linear"}, 0),
    ],
    ids=["stpt", "stpt_horizon", "schedule"],
)
def test_a_run_resumed_from_any_checkpoint_makes_the_same_moves(
    accuracy: Accuracy, epochs: int, learning_rate: dict[str, Any], rounds: int
) -> None:
    uninterrupted = trained(accuracy, epochs, **learning_rate)
    assert len(uninterrupted.named("checkpoint_epoch")) == epochs
    assert len(uninterrupted.named("checkpoint_round")) >= rounds
    for checkpoint in uninterrupted.checkpoints:
        resumed = trained(accuracy, epochs, checkpoint, **learning_rate)
        assert resumed.moves[1:] == uninterrupted.moves[checkpoint.moves :]


def test_a_finished_run_that_is_resumed_trains_no_more() -> None:
    run = trained(epochs=2, checkpoint=Checkpoint(next_epoch=3))
    assert run.moves == [Move("initial_state")]


def test_a_training_that_collapsed_starts_again() -> None:
    """Of a replay, whose second epoch began from the initial weights."""
    run = prepared(BEST_NEAR_A_TENTH, 2, policy="schedule")
    epochs = [
        RecordedEpoch(
            epoch=epoch,
            optimizer="SGD",
            auto_weight_decay=False,
            restarts=epoch == 2,
            lr_multipliers={},
            steps=Steps(0, (lr,)),
        )
        for epoch, lr in ((1, 0.3), (2, 0.1))
    ]
    run.policy = RecordedSchedule(tuple(epochs))
    train(run)
    assert run.moves[1:] == [
        Move("train_epoch", 1, "s", (0.3,)),
        Move("evaluate", 1, "s 1:main@0.3x1"),
        Move("checkpoint_epoch", 1, "s 1:main@0.3x1"),
        Move("start_again", 2),
        Move("train_epoch", 2, "s", (0.1,)),
        Move("evaluate", 2, "s 2:main@0.1x1"),
        Move("checkpoint_epoch", 2, "s 2:main@0.1x1"),
    ]
