"""Injected failures, to test that a run survives them: which process, when and how.

    RAYTRAIN_OPT_FAULTS='[{"role": "worker", "index": 1, "phase": "main_train", "step": 3}]'

in the driver's environment. Each fault happens once per run, also if its process is restarted.
A run without faults pays nothing: the hooks that inject them exist anyway.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from raytrain_opt.config.section import NonNegativeInt, PositiveInt, Section
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.pools.commands import (
    Command,
    MainTrain,
    OnStep,
    Pretrain,
    Resident,
    SendCandidateState,
)

VARIABLE = "RAYTRAIN_OPT_FAULTS"


class Fault(Section):
    """One failure. A field that is None matches anything."""

    role: Literal["worker", "slot"]
    index: NonNegativeInt | None = None
    epoch: PositiveInt | None = None
    phase: Literal["pretrain", "send_candidate_state", "main_train", "evaluate"]  # a command
    step: NonNegativeInt | None = None  # before which it fails; None: before its state is loaded
    action: Literal["kill", "hang", "wait", "raise"] = "kill"  # wait: hang for ten seconds
    always: bool = False  # on every match instead of the first

    def matches(self, resident: Resident, command: Command) -> bool:
        """Whether this process fails in this command."""
        return (
            (self.role, self.phase) == (resident.pool, command.name)
            and self.index in (None, resident.index)
            and self.epoch in (None, _epoch(command))
        )


Faults = tuple[Fault, ...]


def planned_faults(environment: Mapping[str, str] = os.environ) -> Faults:
    """Return the faults that the environment asks for. Raises JobError if they are invalid."""
    text = environment.get(VARIABLE)
    if not text:
        return ()
    try:
        return TypeAdapter(Faults).validate_json(text)
    except ValidationError as error:
        raise JobError([Problem(VARIABLE, str(error), text)], "environment") from error


def inject(
    faults: Faults,
    resident: Resident,
    command: Command,
    on_step: OnStep,
    is_first: Callable[[str], bool],
) -> OnStep:
    """Fail if a fault matches, at first (`is_first`); return `on_step`, perhaps wrapped."""
    matching = {n: fault for n, fault in enumerate(faults) if fault.matches(resident, command)}

    def fail(step: int | None) -> None:
        for number, fault in matching.items():
            if fault.step == step and (fault.always or is_first(f"fault {number}")):
                _fail(number, fault.action)

    fail(None)
    if all(fault.step is None for fault in matching.values()):
        return on_step

    def failing_on_step(done: int, total: int) -> object:
        is_last = on_step(done, total)
        fail(done)
        return is_last

    return failing_on_step


def _fail(number: int, action: str) -> None:
    if action == "raise":
        raise RuntimeError(f"injected failure {number}")
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait(10.0 if action == "wait" else None)  # or for ever


def _epoch(command: Command) -> int | None:
    match command:
        case Pretrain():
            return command.plan.epoch
        case SendCandidateState():
            return command.round.plan.epoch
        case MainTrain():
            return command.epoch
    return None
