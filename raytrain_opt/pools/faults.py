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
from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from raytrain_opt.config.section import NonNegativeInt, PositiveInt, Section
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.pools.commands import Command, MainTrain, Pretrain, SendCandidateState

VARIABLE = "RAYTRAIN_OPT_FAULTS"


class Fault(Section):
    """One failure. A field that is None matches anything.

    `phase`: name of a command (see `commands`). `step`: number of the step, from 0, before which
    the process fails; None: when the command arrives, before its state is loaded. `always`: on
    every match instead of the first. To `wait` is to hang for ten seconds.
    """

    role: Literal["worker", "slot"]
    index: NonNegativeInt | None = None
    epoch: PositiveInt | None = None
    phase: Literal["pretrain", "send_candidate_state", "main_train", "evaluate"]
    step: NonNegativeInt | None = None
    action: Literal["kill", "hang", "wait", "raise"] = "kill"
    always: bool = False

    def matches(self, command: Command) -> bool:
        """Whether the process fails in this command."""
        return self.phase == command.name and self.epoch in (None, _epoch(command))


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


@dataclass(frozen=True)
class FaultInjector:
    """The faults of one resident, by number. `is_first(number)` is true once per run and fault."""

    faults: dict[int, Fault]
    is_first: Callable[[int], bool]

    @classmethod
    def for_resident(
        cls, faults: Faults, role: str, index: int, is_first: Callable[[int], bool]
    ) -> FaultInjector:
        """Select the faults that can happen to this resident."""
        selected = {
            number: fault
            for number, fault in enumerate(faults)
            if fault.role == role and fault.index in (None, index)
        }
        return cls(selected, is_first)

    def watch(
        self, command: Command, on_step: Callable[[int, int], object]
    ) -> Callable[[int, int], object]:
        """Fail now if the command matches; return `on_step`, wrapped if a step is to fail."""
        matching = {n: fault for n, fault in self.faults.items() if fault.matches(command)}
        for number, fault in matching.items():
            if fault.step is None:
                self._fail(number, fault)
        at_steps = {n: fault for n, fault in matching.items() if fault.step is not None}
        if not at_steps:
            return on_step

        def failing_on_step(done: int, total: int) -> object:
            is_last = on_step(done, total)
            for number, fault in at_steps.items():
                if fault.step == done:
                    self._fail(number, fault)
            return is_last

        return failing_on_step

    def _fail(self, number: int, fault: Fault) -> None:
        if not fault.always and not self.is_first(number):
            return
        if fault.action == "raise":
            raise RuntimeError(f"injected failure {number}")
        if fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait(10.0 if fault.action == "wait" else None)  # or for ever


def _epoch(command: Command) -> int | None:
    match command:
        case Pretrain():
            return command.plan.epoch
        case SendCandidateState():
            return command.round.plan.epoch
        case MainTrain():
            return command.epoch
    return None
