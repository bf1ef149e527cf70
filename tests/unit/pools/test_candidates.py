"""What a slot and a worker keep: states in host memory, and memory of the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch

from raytrain_opt.pools.commands import (
    CandidatePart,
    Evaluate,
    MainTrain,
    Pretrain,
    SendCandidateState,
)
from raytrain_opt.pools.in_process import InProcessStates
from raytrain_opt.pools.worker import Slot, Worker
from raytrain_opt.results import EvalTotals, Steps, TrainTotals
from raytrain_opt.search.policy import Candidate, TryCandidates
from tests.support.rounds import ignore, train_round

BATCH = 8


class FakeState:
    """A state: its only number is the rate that it was trained at."""

    def __init__(self, lr: float) -> None:
        self.lr = lr


class FakeLearner:
    """A learner that trains to the loss `lr`; its allocator caches what each phase has used."""

    position, failure = "", None

    config = SimpleNamespace(worker_count=1, micro_batches=1)
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.lr, self.cached_mib, self.trained = 0.0, 0, 0
        self.states: WeakSet[FakeState] = WeakSet()

    def load(self, state: FakeState) -> None:
        self.lr = state.lr

    def state(self, *, copy: bool) -> FakeState:
        state = FakeState(self.lr)
        self.states.add(state)
        return state

    def train(self, epoch: int, steps: Steps, *_: Any, **__: Any) -> TrainTotals:
        self.begin(epoch, steps)
        self.advance(len(steps.lrs), lambda _: None)
        return self.end()

    def begin(self, epoch: int, steps: Steps, *_: Any, **__: Any) -> None:
        self.steps, self.done = steps, 0
        self.trained += 1

    def advance(self, until: int, on_step: Callable[[int], object]) -> None:
        on_step(self.done)
        self.lr, self.done = self.steps.lrs[0], until
        if self.lr < 0:
            raise ValueError("a planted failure")
        self.cached_mib += 100

    def take_totals(self) -> TrainTotals:
        done, self.done, self.steps = self.done, 0, self.steps.after(self.done)
        return TrainTotals(done, BATCH, (self.lr * BATCH,), 0, 1.0, 0.1)

    end = take_totals

    def evaluate(self, *_: Any, **__: Any) -> EvalTotals:
        self.cached_mib += 10
        return EvalTotals(BATCH, {"loss": self.lr * BATCH, "accuracy": 1}, 0.1)

    def add_ranks(self, part: EvalTotals) -> EvalTotals:
        return part

    def finish_phase(self, *, fresh: bool = False) -> None:
        self.cached_mib += 1

    def release_memory(self) -> None:
        self.cached_mib = 0


def make(kind: str) -> tuple[Slot | Worker, FakeLearner, InProcessStates]:
    learner, states = FakeLearner(), InProcessStates()
    any_learner: Any = learner
    if kind == "slot":
        return Slot(any_learner, 0, states, "global"), learner, states
    return Worker(any_learner, 0, 1, states), learner, states


def a_round(states: InProcessStates, *lrs: float, keeps_winner: bool = True) -> Pretrain:
    candidates = tuple(Candidate(i, 1.0, lr) for i, lr in enumerate(lrs))
    plan = TryCandidates(1, 1.0, candidates, (1.0, 1.0), keeps_winner=keeps_winner)
    start: Any = FakeState(9.0)
    return Pretrain(states.put("start", start), plan, {0: candidates[0]})


@pytest.mark.parametrize("kind", ["slot", "worker"])
@pytest.mark.parametrize("keeps_winner", [False, True])
def test_only_the_best_state_so_far_is_kept(kind: str, keeps_winner: bool) -> None:
    resident, learner, states = make(kind)
    command = a_round(states, 0.2, 0.5, 0.1, 0.3, 0.4, keeps_winner=keeps_winner)
    train_round(resident, command.state, command.action)
    # The state of the last candidate is in the learner.
    assert [state.lr for state in learner.states] == ([0.1] if keeps_winner else [])
    for lr in (0.1, 0.2, 0.4, 0.3):
        candidate = next(c for c in command.action.candidates if c.lr == lr)
        trained = learner.trained
        ref = resident.handle(SendCandidateState(command, candidate, 0), ignore)
        assert (states.get(ref).lr, ref.id) == (lr, f"1.candidate{candidate.index}")
        assert (learner.trained == trained) == (keeps_winner and lr == 0.1), lr


@pytest.mark.parametrize("kind", ["slot", "worker"])
def test_no_command_leaves_cached_memory_on_the_device(kind: str) -> None:
    resident, learner, states = make(kind)
    command = a_round(states, 0.2, 0.1)
    commands: list[Any] = [
        command,
        SendCandidateState(command, command.action.candidates[0], 0),
        SendCandidateState(command, command.action.candidates[0], 1),  # to another slot
    ]
    if kind == "worker":
        commands += [MainTrain(command.state, 1, Steps(2, (0.1,))), Evaluate(command.state)]
    for each in commands:
        learner.cached_mib = 7
        resident.handle(each, ignore)
        assert learner.cached_mib == 0, each.name
    with pytest.raises(ValueError, match="a planted failure"):
        resident.handle(a_round(states, -1.0, 0.1), ignore)
    assert learner.cached_mib == 0


def test_the_main_training_keeps_no_state_of_a_candidate() -> None:
    worker, learner, states = make("worker")
    command = a_round(states, 0.1, 0.2)
    train_round(worker, command.state, command.action)
    assert len(learner.states) == 1
    worker.handle(MainTrain(states.put("other", FakeState(1.0)), 1, Steps(2, (0.1,))), ignore)  # type: ignore[arg-type]
    assert len(learner.states) == 0


def test_segments_are_one_phase_until_another_command_comes() -> None:
    worker, learner, states = make("worker")
    start = states.put("start", FakeState(1.0))  # type: ignore[arg-type]
    steps, begun = Steps(2, (0.1,) * 6), []

    def handle(command: MainTrain | Evaluate) -> Any:
        reply = worker.handle(command, ignore)
        begun.append(learner.trained)
        return reply

    assert handle(MainTrain(start, 1, steps, 1, sends=False)) is None
    assert learner.cached_mib == 100  # of the next segment
    assert handle(MainTrain(start, 1, steps, 2, sends=False)) is None
    sent = handle(MainTrain(start, 1, steps, 3))
    assert (sent.state.id, sent.totals.steps) == ("1.5", 3)
    rest = steps.after(3)
    assert handle(MainTrain(sent.state, 1, rest, 1, sends=False)) is None
    assert begun == [1, 1, 1, 1]
    handle(Evaluate(sent.state))
    assert handle(MainTrain(sent.state, 1, rest, 2, sends=False)) is None  # from the state again
    ended = handle(MainTrain(sent.state, 1, rest))
    assert (ended.state.id, ended.totals.steps) == ("1.8", 3)
    assert handle(MainTrain(sent.state, 1, rest, 1, sends=False)) is None
    worker.forget_state()
    assert handle(MainTrain(sent.state, 1, rest, 1, sends=False)) is None
    with pytest.raises(ValueError, match="a planted failure"):
        handle(MainTrain(ended.state, 2, Steps(0, (-1.0,)), 1, sends=False))
    assert learner.cached_mib == 0
    assert begun == [1, 1, 1, 1, 1, 2, 2, 3, 4]


def test_a_slot_that_was_given_up_trains_nothing() -> None:
    slot, learner, states = make("slot")
    command = a_round(states, 0.2, 0.1)
    wave = dict(enumerate(command.action.candidates, start=1))
    assert slot.handle(Pretrain(command.state, command.action, wave), ignore) is None
    assert learner.trained == 0


@pytest.mark.parametrize("kind", ["slot", "worker"])
def test_a_candidate_continues_within_its_steps(kind: str) -> None:
    """In the process that has trained it, from a part that was sent, or with both lost."""
    resident, learner, states = make(kind)
    command = a_round(states, 0.1, 0.2)
    begun: list[int] = []

    def handle(until: int | None, *, sends: bool, part: CandidatePart | None = None) -> Any:
        parts = {} if part is None else {0: part}
        segment = replace(command, until=until, sends=sends, parts=parts)
        reply = resident.handle(segment, lambda done, _: steps.append(done))
        begun.append(learner.trained)
        return reply

    steps: list[int] = []
    assert handle(1, sends=False) is None
    assert learner.cached_mib == 100  # of the next segment
    part = handle(1, sends=True)
    assert (part.totals.steps, part.state.id) == (1, "1.candidate0.1")
    assert handle(1, sends=False, part=part) is None
    result = handle(None, sends=True, part=part)
    assert (result.candidate.index, result.samples) == (0, 2 * BATCH)
    assert begun == [1, 1, 1, 1]
    resident.forget_state()
    result = handle(None, sends=True, part=part)  # from the part again
    assert (result.samples, begun[-1]) == (2 * BATCH, 2)
    assert steps == [0, 1, 1, 2, 1]
