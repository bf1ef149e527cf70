"""Failures on purpose, to see that a run survives them: who, where, when and how.

    RAYTRAIN_OPT_FAULTS='[{"role": "worker", "index": 1, "phase": "main_train", "step": 3}]'

in the driver's environment. Each happens once in a run, also when its process is started again.
A run without faults pays nothing: its hooks are the ones it has anyway.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from pydantic import TypeAdapter, ValidationError

from raytrain_opt.config.section import NonNegativeInt, PositiveInt, Section
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.pools.commands import Command, Evaluate, MainTrain, Pretrain, TakeState

VARIABLE = "RAYTRAIN_OPT_FAULTS"

Phase = Literal["pretrain", "take_state", "main_train", "evaluate"]
_PHASES: dict[type[Any], Phase] = {
    Pretrain: "pretrain",
    TakeState: "take_state",
    MainTrain: "main_train",
    Evaluate: "evaluate",
}


class Fault(Section):
    """One failure. What is None matches anything; `step` None: when the command arrives, before
    its state is loaded; else before that step (from 0) of the phase. `always`: not only once.
    """

    role: Literal["worker", "slot"]
    index: NonNegativeInt | None = None
    epoch: PositiveInt | None = None
    phase: Phase
    step: NonNegativeInt | None = None
    action: Literal["kill", "hang", "raise"] = "kill"
    always: bool = False


Faults = tuple[Fault, ...]


def planned_faults(environment: Mapping[str, str] = os.environ) -> Faults:
    """Those that the environment asks for. Raises JobError when it cannot be understood."""
    text = environment.get(VARIABLE)
    if not text:
        return ()
    try:
        return TypeAdapter(Faults).validate_json(text)
    except ValidationError as error:
        raise JobError([Problem(VARIABLE, str(error), text)], "environment") from error


@dataclass(frozen=True)
class Injection:
    """The faults of one member. `is_first(number)` says once whether this one is still due."""

    faults: dict[int, Fault]
    is_first: Callable[[int], bool]

    @classmethod
    def of(
        cls, faults: Faults, role: str, index: int, is_first: Callable[[int], bool]
    ) -> Injection:
        """Those that this member can meet."""
        mine = {
            number: fault
            for number, fault in enumerate(faults)
            if fault.role == role and fault.index in (None, index)
        }
        return cls(mine, is_first)

    def watch(
        self, command: Command, on_step: Callable[[int, int], None]
    ) -> Callable[[int, int], None]:
        """Fail now if this command is to; returns `on_step`, failing at a step if one is to."""
        due = {n: fault for n, fault in self.faults.items() if _meets(fault, command)}
        for number, fault in due.items():
            if fault.step is None:
                self._fail(number, fault)
        at_steps = {n: fault for n, fault in due.items() if fault.step is not None}
        if not at_steps:
            return on_step

        def failing(done: int, total: int) -> None:
            on_step(done, total)
            for number, fault in at_steps.items():
                if fault.step == done:
                    self._fail(number, fault)

        return failing

    def _fail(self, number: int, fault: Fault) -> None:
        if not fault.always and not self.is_first(number):
            return
        if fault.action == "raise":
            raise RuntimeError(f"injected failure {number}")
        if fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        _hang()


def _meets(fault: Fault, command: Command) -> bool:
    if _PHASES.get(type(command)) != fault.phase:
        return False
    return fault.epoch is None or fault.epoch == _epoch(command)


def _epoch(command: Command) -> int | None:
    match command:
        case Pretrain():
            return command.plan.epoch
        case TakeState():
            return command.round.plan.epoch
        case MainTrain():
            return command.epoch
    return None


def _hang() -> NoReturn:
    while True:
        threading.Event().wait(3600)
