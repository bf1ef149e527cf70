"""Injected failures: when they happen, and in which process."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from raytrain_opt.errors import JobError
from raytrain_opt.pools.commands import (
    Command,
    Evaluate,
    MainTrain,
    OnStep,
    Pretrain,
    Resident,
    SendCandidateState,
    StateRef,
)
from raytrain_opt.pools.faults import VARIABLE, Fault, inject, planned_faults
from raytrain_opt.search.policy import Candidate, TryCandidates

STATE = StateRef("s", None)  # type: ignore[arg-type]
CANDIDATE = Candidate(0, 1.0, 0.1)
PRETRAIN = Pretrain(STATE, TryCandidates(2, 0.1, "", (CANDIDATE,), (1.0,)), (0, 1))
WORKER = Resident("worker", 1, "node", 7, "log")
COMMANDS: dict[str, Command] = {
    "pretrain": PRETRAIN,
    "send_candidate_state": SendCandidateState(PRETRAIN, CANDIDATE, 0),
    "main_train": MainTrain(STATE, 2, 0, (0.1,) * 3),
    "evaluate": Evaluate(STATE),
}


class Injector:
    """A fault that raises, in worker 1; it happens once."""

    def __init__(self, **fault: Any) -> None:
        self.faults = (Fault.model_validate({"action": "raise", "role": "worker", **fault}),)
        self.seen: set[str] = set()

    def is_first(self, claim: str) -> bool:
        first = claim not in self.seen
        self.seen.add(claim)
        return first

    def watch(self, command: Command, on_step: OnStep) -> OnStep:
        return inject(self.faults, WORKER, command, on_step, self.is_first)


def steps_until_it_fails(made: Injector, command: Command, steps: int = 3) -> int | None:
    """Return the step of the failure; -1: when the command arrives, None: never."""
    done = -1
    try:
        on_step = made.watch(command, lambda _done, _total: None)
        for done in range(steps):
            on_step(done, steps)
    except RuntimeError:
        return done
    return None


@pytest.mark.parametrize(
    ("fault", "at"),
    [
        ({"phase": "main_train"}, -1),
        ({"phase": "main_train", "step": 0}, 0),
        ({"phase": "main_train", "step": 2}, 2),
        ({"phase": "main_train", "step": 3}, None),
        ({"phase": "main_train", "epoch": 2, "step": 1}, 1),
        ({"phase": "main_train", "epoch": 3, "step": 1}, None),
        ({"phase": "evaluate", "step": 1}, None),
        ({"phase": "main_train", "index": 1}, -1),
        ({"phase": "main_train", "index": 0}, None),
        ({"phase": "main_train", "role": "slot"}, None),
    ],
)
def test_a_fault_happens_at_its_place(fault: dict[str, Any], at: int | None) -> None:
    assert steps_until_it_fails(Injector(**fault), COMMANDS["main_train"]) == at


@pytest.mark.parametrize("phase", list(COMMANDS))
def test_a_fault_happens_in_its_phase_only(phase: str) -> None:
    met = [
        name
        for name, command in COMMANDS.items()
        if steps_until_it_fails(Injector(phase=phase), command) is not None
    ]
    assert met == [phase]


def test_a_fault_happens_once_unless_it_is_always() -> None:
    once, always = Injector(phase="evaluate"), Injector(phase="evaluate", always=True)
    command = COMMANDS["evaluate"]
    assert [steps_until_it_fails(once, command) for _ in range(3)] == [-1, None, None]
    assert [steps_until_it_fails(always, command) for _ in range(3)] == [-1, -1, -1]


def test_without_a_fault_the_hook_is_returned_unchanged() -> None:
    def on_step(done: int, total: int) -> None: ...

    assert Injector(phase="evaluate").watch(COMMANDS["main_train"], on_step) is on_step


def test_a_kill_is_a_sigkill() -> None:
    child = os.fork()
    if child == 0:
        fault = Fault(role="worker", phase="pretrain")
        inject((fault,), WORKER, PRETRAIN, lambda _d, _t: None, lambda _: True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_faults_are_read_from_the_environment() -> None:
    text = '[{"role": "slot", "phase": "pretrain"}, {"role": "worker", "phase": "evaluate"}]'
    assert [fault.role for fault in planned_faults({VARIABLE: text})] == ["slot", "worker"]
    assert planned_faults({}) == planned_faults({VARIABLE: ""}) == ()


@pytest.mark.parametrize("text", ["{", "[1]", '[{"role": "driver", "phase": "evaluate"}]'])
def test_invalid_faults_are_refused(text: str) -> None:
    with pytest.raises(JobError, match=VARIABLE):
        planned_faults({VARIABLE: text})
