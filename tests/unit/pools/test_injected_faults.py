"""Injected failures: when they happen, and in which process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from raytrain_opt.pools.commands import (
    Command,
    Evaluate,
    MainTrain,
    Pretrain,
    SendCandidateState,
    StateRef,
)
from raytrain_opt.results import Steps
from raytrain_opt.search.policy import Candidate, TryCandidates
from tests.support.faults import Fault, Faults

STATE = StateRef("s", None)  # type: ignore[arg-type]
CANDIDATE = Candidate(0, 1.0, 0.1)
PRETRAIN = Pretrain(STATE, TryCandidates(2, 0.1, "", (CANDIDATE,), (1.0,)), (0, 1))
COMMANDS: dict[str, Command] = {
    "pretrain": PRETRAIN,
    "send_candidate_state": SendCandidateState(PRETRAIN, CANDIDATE, 0),
    "main_train": MainTrain(STATE, 2, Steps(0, (0.1,) * 3)),
    "evaluate": Evaluate(STATE),
}


def injector(folder: Path, **fault: Any) -> Faults:
    """Return a fault that raises in a worker."""
    return Faults([Fault(**{"action": "raise", "role": "worker", **fault})], str(folder))


def steps_until_it_fails(made: Faults, command: Command, steps: int = 3) -> int | None:
    """Return the step of the failure; -1: when the command arrives, None: never."""
    done = -1
    try:
        on_step = made.inject("worker", 1, command, lambda _done, _total: None)
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
def test_a_fault_happens_at_its_place(
    tmp_path: Path, fault: dict[str, Any], at: int | None
) -> None:
    assert steps_until_it_fails(injector(tmp_path, **fault), COMMANDS["main_train"]) == at


@pytest.mark.parametrize("phase", list(COMMANDS))
def test_a_fault_happens_in_its_phase_only(tmp_path: Path, phase: str) -> None:
    met = [
        name
        for name, command in COMMANDS.items()
        if steps_until_it_fails(injector(tmp_path, phase=phase, always=True), command) is not None
    ]
    assert met == [phase]


def test_a_fault_happens_once_unless_it_is_always(tmp_path: Path) -> None:
    once, always = (
        injector(tmp_path, phase="evaluate"),
        injector(tmp_path, phase="evaluate", always=True),
    )
    command = COMMANDS["evaluate"]
    assert [steps_until_it_fails(once, command) for _ in range(3)] == [-1, None, None]
    assert [steps_until_it_fails(always, command) for _ in range(3)] == [-1, -1, -1]


def test_a_kill_is_a_sigkill(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        fault = injector(tmp_path, phase="pretrain", action="kill")
        fault.inject("worker", 1, PRETRAIN, lambda _d, _t: None)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
