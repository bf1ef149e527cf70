"""The segments of a main training, with workers that only count steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from raytrain_opt.pools import interface
from raytrain_opt.pools.commands import MainTrain, MainTrainReply, StateRef
from raytrain_opt.pools.interface import SynchronousTraining
from raytrain_opt.results import Steps, TrainTotals

STEPS, STEP_S = 1000, 1 / 64


@dataclass
class CountingWorkers:
    """Workers that take `step_s` for each step, and `load_s` more for the first one."""

    step_s: float
    load_s: float = 0.0
    now_s: float = 0.0
    done: int = 0
    ends: list[int] = field(default_factory=list)

    def command(self, command: MainTrain, _: Any = None) -> dict[int, Any]:
        self.now_s += (command.end - self.done) * self.step_s + (0 if self.done else self.load_s)
        self.done = command.end
        self.ends.append(command.end)
        if not command.sends:
            return {0: None}
        totals = TrainTotals(self.done, self.done, (0.0,), 0, 1.0, 0.0)
        reply = MainTrainReply(totals, {}, StateRef("sent", None))
        return {0: reply}


def train(
    monkeypatch: pytest.MonkeyPatch,
    workers: CountingWorkers,
    training: SynchronousTraining | None = None,
    until: int | None = None,
    due_s: float = 1e9,
) -> tuple[SynchronousTraining, int]:
    """Train an epoch, or until a state is due; return how many steps were made."""
    monkeypatch.setattr(interface, "monotonic_s", lambda: workers.now_s)
    training = training or SynchronousTraining(workers)  # type: ignore[arg-type]
    command = MainTrain(StateRef("start", None), 1, Steps(0, (0.1,) * STEPS), until)
    outcome = training.train(command, is_due=lambda: workers.now_s >= due_s)
    workers.done = 0
    return training, outcome.totals.steps


def test_segments_grow_to_three_seconds_and_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = CountingWorkers(STEP_S, load_s=0.5)
    training, steps = train(monkeypatch, workers)
    assert steps == STEPS
    assert workers.ends[:5] == [1, 6, 46, 238, 430]  # 5: 3 s at the speed of the first; 40: 8 x 5
    assert workers.ends[-1] == STEPS
    workers.ends.clear()
    train(monkeypatch, workers, training)
    assert workers.ends[0] == 192


@pytest.mark.parametrize("step_s", [0.0, 5.0])
def test_segments_have_at_least_a_step_and_grow_slowly(
    step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first steps say little about the others."""
    workers = CountingWorkers(step_s)
    assert train(monkeypatch, workers)[1] == STEPS
    lengths = [b - a for a, b in zip([0, *workers.ends], workers.ends, strict=False)]
    assert lengths == ([1, 8, 64, 512, 415] if step_s == 0.0 else [1] * STEPS)


def test_the_state_is_sent_after_the_segment_in_which_it_is_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = CountingWorkers(STEP_S)
    _, steps = train(monkeypatch, workers, due_s=6.0)
    assert workers.ends == [1, 9, 73, 265, 457, 457]
    assert steps == 457
    assert train(monkeypatch, CountingWorkers(STEP_S), due_s=0.0)[1] == 1


def test_no_step_is_made_after_the_end_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = CountingWorkers(STEP_S)
    training, steps = train(monkeypatch, workers, until=9)
    assert (steps, workers.ends) == (9, [1, 9])
    workers.ends.clear()
    assert train(monkeypatch, workers, training, until=0)[1] == 0
    assert workers.ends == [0]
