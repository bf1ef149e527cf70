"""Failures on purpose: when they happen, and to whom."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from raytrain_opt.errors import JobError
from raytrain_opt.pools.commands import Command, Evaluate, MainTrain, Pretrain, StateRef, TakeState
from raytrain_opt.pools.faults import VARIABLE, Fault, Injection, planned_faults
from raytrain_opt.search.policy import Candidate, Plan

STATE = StateRef("s", None)  # type: ignore[arg-type]
CANDIDATE = Candidate(0, 1.0, 0.1)
PRETRAIN = Pretrain(STATE, Plan(2, 0.1, "", (CANDIDATE,), (1.0,)), (0, 1))
COMMANDS: dict[str, Command] = {
    "pretrain": PRETRAIN,
    "take_state": TakeState(PRETRAIN, CANDIDATE, 0),
    "main_train": MainTrain(STATE, 2, 0, (0.1,) * 3),
    "evaluate": Evaluate(STATE),
}


def injection(fault: dict[str, Any], role: str = "worker", index: int = 1) -> Injection:
    """Of one fault that raises; each happens once."""
    seen: set[int] = set()

    def is_first(number: int) -> bool:
        first = number not in seen
        seen.add(number)
        return first

    faults = (Fault.model_validate({"action": "raise", "role": "worker", **fault}),)
    return Injection.of(faults, role, index, is_first)


def steps_until_it_fails(made: Injection, command: Command, steps: int = 3) -> int | None:
    """-1: at once; None: never."""
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
def test_it_fails_where_it_is_told_to(fault: dict[str, Any], at: int | None) -> None:
    assert steps_until_it_fails(injection(fault), COMMANDS["main_train"]) == at


@pytest.mark.parametrize("phase", list(COMMANDS))
def test_each_phase_is_its_own(phase: str) -> None:
    met = [
        name
        for name, command in COMMANDS.items()
        if steps_until_it_fails(injection({"phase": phase}), command) is not None
    ]
    assert met == [phase]


def test_it_fails_once_unless_told_otherwise() -> None:
    once, always = (
        injection({"phase": "evaluate"}),
        injection({"phase": "evaluate", "always": True}),
    )
    command = COMMANDS["evaluate"]
    assert [steps_until_it_fails(once, command) for _ in range(3)] == [-1, None, None]
    assert [steps_until_it_fails(always, command) for _ in range(3)] == [-1, -1, -1]


def test_without_a_fault_the_hook_is_the_one_that_was_given() -> None:
    def on_step(done: int, total: int) -> None: ...

    for made in (Injection({}, lambda _: True), injection({"phase": "evaluate"})):
        assert made.watch(COMMANDS["main_train"], on_step) is on_step


def test_a_killed_process_gets_no_chance() -> None:
    child = os.fork()
    if child == 0:
        fault = Fault(role="slot", phase="pretrain")
        Injection.of((fault,), "slot", 0, lambda _: True).watch(PRETRAIN, lambda _d, _t: None)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_faults_are_read_from_the_environment() -> None:
    text = '[{"role": "slot", "phase": "pretrain"}, {"role": "worker", "phase": "evaluate"}]'
    assert [fault.role for fault in planned_faults({VARIABLE: text})] == ["slot", "worker"]
    assert planned_faults({}) == planned_faults({VARIABLE: ""}) == ()


@pytest.mark.parametrize("text", ["{", "[1]", '[{"role": "driver", "phase": "evaluate"}]'])
def test_faults_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(JobError, match=VARIABLE):
        planned_faults({VARIABLE: text})
