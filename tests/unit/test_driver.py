"""The algorithm itself, on a run that only pretends: which moves, in which order, with what."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from raytrain_opt.config.schema import Job
from raytrain_opt.driver import train
from raytrain_opt.errors import DivergedError
from raytrain_opt.optim.batch_ramp import EpochSteps
from raytrain_opt.position import Position
from raytrain_opt.search import build_policy
from raytrain_opt.search.policy import Candidate, CandidateResult, Plan, Round

STEPS = 10


# Of a learning rate; None: training at it diverges.
Accuracy = Callable[[float], float | None]


def best_near(rate: float) -> Accuracy:
    """Accuracy falls with the distance from the rate, in factors."""
    return lambda lr: 1 / (1 + abs(math.log(lr / rate)))


BEST_NEAR_A_TENTH = best_near(0.1)


class Move(NamedTuple):
    """One call of the driver, with what tells it from others."""

    name: str
    epoch: int = 0
    state: str = ""
    lrs: tuple[float, ...] = ()


class Commit(NamedTuple):
    """From where a run can go on: with how many moves done."""

    position: Position = Position()
    state: str = "s"
    moves: int = 1


START = Commit()


class PretendedRun:
    """The moves of `TrainingRun`; its states are texts of all that was done to them."""

    def __init__(self, job: Job, accuracy: Accuracy) -> None:
        self.steps = EpochSteps(STEPS)
        self.job, self.policy = job, build_policy(job, self.steps)
        self.accuracy = accuracy
        self.position = Position()
        self.resumes_at = START
        self.moves: list[Move] = []
        self.commits: list[Commit] = []
        self.losses: tuple[float, ...] = ()

    def initial_state(self) -> str:
        self.moves.append(Move("initial_state"))
        self.position = self.resumes_at.position
        return self.resumes_at.state

    def pretrain(self, state: str, plan: Plan) -> list[CandidateResult]:
        lrs = tuple(candidate.lr for candidate in plan.candidates)
        self.moves.append(Move("pretrain", plan.epoch, state, lrs))
        return [self._result(candidate) for candidate in plan.candidates]

    def _result(self, candidate: Candidate) -> CandidateResult:
        reached = self.accuracy(candidate.lr)
        status, accuracy = ("diverged", math.nan) if reached is None else ("ok", reached)
        return CandidateResult(candidate, status, accuracy, -accuracy, 1.0, 8, 1.0, 0.1, slot=0)

    def take_state(
        self, start: str, plan: Plan, results: Sequence[CandidateResult], choice: Round
    ) -> str:
        assert len(results) == len(plan.candidates)
        if choice.winner is None:
            self.moves.append(Move("lost", plan.epoch, lrs=(plan.base_lr,)))
            return start
        if plan.kept_steps == 0:
            self.moves.append(Move("decided", plan.epoch, start, (choice.next_base_lr,)))
            return start
        assert choice.winner in results
        lr = choice.winner.candidate.lr
        self.moves.append(Move("take_state", plan.epoch, start, (lr,)))
        return f"{start} {plan.epoch}:pre@{lr:g}x{plan.kept_steps}"

    def main_train(self, state: str, plan: Plan) -> str:
        lrs = plan.lrs
        self.moves.append(Move("main_train", plan.epoch, state, lrs))
        at = f"@{lrs[0]:g}" if lrs else ""
        return f"{state} {plan.epoch}:main{at}x{len(lrs)}"

    def evaluate(self, state: str, plan: Plan) -> None:
        self.moves.append(Move("evaluate", plan.epoch, state))

    def commit(self, state: str, plan: Plan, history: tuple[Round, ...]) -> None:
        self.moves.append(Move("commit", plan.epoch, state))
        self._commit(plan.epoch + 1, history, state)

    def commit_round(self, state: str, plan: Plan, history: tuple[Round, ...]) -> None:
        self.moves.append(Move("commit_round", plan.epoch, state))
        self._commit(plan.epoch, history, state)

    def _commit(self, next_epoch: int, history: tuple[Round, ...], state: str) -> None:
        position = Position(next_epoch=next_epoch, history=history)
        self.commits.append(Commit(position, state, len(self.moves)))

    @property
    def histories(self) -> list[tuple[Round, ...]]:
        """After each epoch."""
        after = [self.moves[commit.moves - 1].name for commit in self.commits]
        pairs = zip(after, self.commits, strict=True)
        return [commit.position.history for name, commit in pairs if name == "commit"]

    def named(self, name: str) -> list[Move]:
        return [move for move in self.moves if move.name == name]


def trained(
    accuracy: Accuracy = BEST_NEAR_A_TENTH,
    epochs: int = 1,
    resumes_at: Commit = START,
    **learning_rate: Any,
) -> PretendedRun:
    """A finished run of the driver's algorithm."""
    run = prepared(accuracy, epochs, **learning_rate)
    run.resumes_at = resumes_at
    train(run.job, run)  # type: ignore[arg-type]
    return run


def prepared(accuracy: Accuracy, epochs: int, **learning_rate: Any) -> PretendedRun:
    section = {"policy": "stpt", "candidates": [2.0, 1.0, 0.5], "alpha": 3, **learning_rate}
    if section["policy"] != "stpt":
        section = learning_rate
    values = {"model": "small_cnn", "data": "digits", "epochs": epochs, "global_batch_size": 8}
    return PretendedRun(Job.model_validate({**values, "learning_rate": section}), accuracy)


def test_an_epoch_is_the_published_sequence_of_moves() -> None:
    run = trained(best_near(0.2), initial=0.1)
    after_round, after_main = "s 1:pre@0.2x3", "s 1:pre@0.2x3 1:main@0.2x7"
    assert run.moves == [
        Move("initial_state"),
        Move("pretrain", 1, "s", (0.2, 0.1, 0.05)),
        Move("take_state", 1, "s", (0.2,)),
        Move("commit_round", 1, after_round),
        Move("main_train", 1, after_round, (0.2,) * 7),
        Move("evaluate", 1, after_main),
        Move("commit", 1, after_main),
    ]


def test_the_next_epoch_starts_from_the_main_trainings_weights_at_the_winners_rate() -> None:
    run = trained(best_near(0.8), epochs=3, initial=0.1)
    assert run.named("pretrain") == [
        Move("pretrain", 1, "s", (0.2, 0.1, 0.05)),
        Move("pretrain", 2, "s 1:pre@0.2x3 1:main@0.2x7", (0.4, 0.2, 0.1)),
        Move("pretrain", 3, run.named("commit")[1].state, (0.8, 0.4, 0.2)),
    ]
    assert [len(history) for history in run.histories] == [1, 2, 3]


def test_warm_up_epochs_have_no_round() -> None:
    warmup = {"epochs": 2, "lr": 0.01, "shape": "constant"}
    run = trained(epochs=3, initial=0.1, warmup=warmup)
    names = [(move.name, move.epoch) for move in run.moves[1:]]
    assert names == [
        ("main_train", 1),
        ("evaluate", 1),
        ("commit", 1),
        ("main_train", 2),
        ("evaluate", 2),
        ("commit", 2),
        ("pretrain", 3),
        ("take_state", 3),
        ("commit_round", 3),
        ("main_train", 3),
        ("evaluate", 3),
        ("commit", 3),
    ]
    assert [move.lrs for move in run.named("main_train")[:2]] == [(0.01,) * STEPS] * 2
    assert [len(history) for history in run.histories] == [0, 0, 1]


def test_a_schedule_trains_whole_epochs_at_its_rates() -> None:
    run = trained(epochs=2, policy="schedule", shape="linear", initial=0.2)
    assert not run.named("pretrain")
    first, second = (move.lrs for move in run.named("main_train"))
    assert (*first, *second) == pytest.approx([0.2 * (1 - step / 20) for step in range(20)])


def test_a_lost_round_is_repeated_at_half_the_rate_from_the_same_state() -> None:
    def accuracy(lr: float) -> float | None:
        return None if lr > 0.15 else best_near(0.1)(lr)

    run = trained(accuracy, initial=0.8)
    assert [(m.name, m.state, m.lrs) for m in run.moves[1:9]] == [
        ("pretrain", "s", (1.6, 0.8, 0.4)),
        ("lost", "", (0.8,)),
        ("commit_round", "s", ()),
        ("pretrain", "s", (0.8, 0.4, 0.2)),
        ("lost", "", (0.4,)),
        ("commit_round", "s", ()),
        ("pretrain", "s", (0.4, 0.2, 0.1)),
        ("take_state", "s", (0.1,)),
    ]
    [history] = run.histories
    assert [choice.winner is None for choice in history] == [True, True, False]
    assert history[-1].next_base_lr == 0.1


@pytest.mark.parametrize("halvings", [0, 2, 5])
def test_when_all_is_lost_the_error_lists_what_was_tried(halvings: int) -> None:
    run = prepared(lambda _: None, epochs=2, initial=0.8, max_halvings=halvings)
    rates = ", ".join(f"{0.8 / 2**i:.4g}" for i in range(halvings + 1))
    with pytest.raises(DivergedError, match=rf"epoch 1: .*: {rates} \("):
        train(run.job, run)  # type: ignore[arg-type]
    assert len(run.named("pretrain")) == len(run.named("lost")) == halvings + 1
    assert not run.named("main_train")
    assert not run.named("commit")


def test_one_candidate_is_no_search_but_the_same_steps() -> None:
    run = trained(epochs=2, initial=0.3, candidates=[1.0])
    assert run.named("pretrain") == []
    assert {move.lrs for move in run.named("main_train")} == {(0.3,) * STEPS}


@pytest.mark.parametrize("alpha", [1.0, STEPS])
def test_pre_training_may_take_the_whole_epoch(alpha: float) -> None:
    run = trained(best_near(0.2), epochs=2, initial=0.1, alpha=alpha)
    assert [move.lrs for move in run.named("main_train")] == [(), ()]
    assert run.named("commit")[0].state == "s 1:pre@0.2x10 1:mainx0"


def test_a_horizon_aware_search_leaves_the_state_and_its_later_rounds_do_not() -> None:
    run = trained(best_near(0.3), epochs=64, policy="stpt_horizon", horizon=1.0)
    made = [move for move in run.moves[1:] if move.name != "commit_round"]
    first = [move for move in made if move.epoch == 1]
    *rounds, decided, trains, _, _ = first
    assert {(move.name, move.state) for move in rounds[::2]} == {("pretrain", "s")}
    assert {move.name for move in rounds[1::2]} == {"lost"}
    assert decided == Move("decided", 1, "s", decided.lrs)
    assert decided.lrs[0] == pytest.approx(0.316, rel=0.05)
    assert (trains.state, len(trains.lrs)) == ("s", STEPS)
    [tries] = [move for move in run.named("pretrain") if move.epoch > 1]
    assert (tries.epoch, len(tries.lrs)) == (9, 3)
    [taken] = run.named("take_state")
    assert taken.lrs == decided.lrs
    main = next(move for move in run.named("main_train") if move.epoch == 9)
    assert main.state == f"{tries.state} 9:pre@{taken.lrs[0]:g}x5"
    assert len(main.lrs) == STEPS - 5


def diverges_above(limit: float) -> Accuracy:
    return lambda lr: None if lr > limit else best_near(0.8)(lr)


@pytest.mark.parametrize(
    ("accuracy", "epochs", "learning_rate", "rounds"),
    [
        # Rounds are lost in epoch 1; the halved rate stays in force.
        (diverges_above(0.5), 5, {"initial": 4.0}, 7),
        (best_near(0.3), 64, {"policy": "stpt_horizon", "horizon": 1.0}, 3),
        (BEST_NEAR_A_TENTH, 3, {"policy": "schedule", "shape": "linear"}, 0),
    ],
    ids=["stpt", "stpt_horizon", "schedule"],
)
def test_a_run_resumed_after_any_round_or_epoch_goes_on_as_if_it_had_not_stopped(
    accuracy: Accuracy, epochs: int, learning_rate: dict[str, Any], rounds: int
) -> None:
    whole = trained(accuracy, epochs, **learning_rate)
    assert len(whole.named("commit")) == epochs
    assert len(whole.named("commit_round")) >= rounds
    for commit in whole.commits:
        rest = trained(accuracy, epochs, commit, **learning_rate)
        assert rest.moves[1:] == whole.moves[commit.moves :]


def test_a_finished_run_that_is_resumed_trains_no_more() -> None:
    run = trained(epochs=2, resumes_at=Commit(Position(next_epoch=3)))
    assert run.moves == [Move("initial_state")]
