"""Injected failures, to test that a run survives them: which process, when and how.

    with injected([{"role": "worker", "index": 1, "phase": "main_train", "step": 3}]):
        run(job)

Each fault happens once, also if its process is restarted. Commands with faults:
    python -m tests.support.faults '[{"role": "worker", ...}]' run jobs/quickstart.yaml
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

from raytrain_opt.pools.commands import (
    SLOT_POOL,
    WORKER_POOL,
    Command,
    MainTrain,
    OnStep,
    Pretrain,
    SendCandidateState,
)
from raytrain_opt.pools.programs import ResidentConfig, SynchronousProgram
from raytrain_opt.pools.resident import Group, Handler

if TYPE_CHECKING:
    from ray.train import TrainContext


@dataclass(frozen=True)
class Fault:
    """One failure. A field that is None matches anything."""

    role: Literal["worker", "slot"]
    phase: Literal["pretrain", "send_candidate_state", "main_train", "evaluate"]  # a command
    index: int | None = None
    epoch: int | None = None
    step: int | None = None  # before which it fails; None: before its state is loaded
    action: Literal["kill", "hang", "wait", "raise"] = "kill"  # wait: hang for ten seconds
    always: bool = False  # on every match instead of the first
    from_step: int = 0  # of the epoch: not in a main training from a state before it

    def matches(self, role: str, index: int, command: Command) -> bool:
        """Whether this process fails in this command."""
        return (
            (self.role, self.phase) == (role, command.name)
            and self.index in (None, index)
            and self.epoch in (None, _epoch(command))
            and (not isinstance(command, MainTrain) or command.steps.first >= self.from_step)
        )


@dataclass(frozen=True)
class Faults:
    """The faults of a run. `folder` has a file for each that has happened."""

    faults: Sequence[Fault]
    folder: str

    def inject(self, role: str, index: int, command: Command, on_step: OnStep) -> OnStep:
        """Fail if a fault matches; return `on_step`, perhaps wrapped."""
        matching = {n: f for n, f in enumerate(self.faults) if f.matches(role, index, command)}

        def fail(step: int | None) -> None:
            for number, fault in matching.items():
                if fault.step == step and (fault.always or self._is_first(number)):
                    _fail(number, fault.action)

        fail(None)
        if all(fault.step is None for fault in matching.values()):
            return on_step

        def failing_on_step(done: int, total: int) -> None:
            on_step(done, total)
            fail(done)

        return failing_on_step

    def _is_first(self, number: int) -> bool:
        try:
            Path(self.folder, str(number)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def install(self, config: ResidentConfig) -> ResidentConfig:
        """Return the configuration of residents that fail."""
        return replace(config, program=FaultyProgram(config.program, self))


def _fail(number: int, action: str) -> None:
    if action == "raise":
        raise RuntimeError(f"injected failure {number}")
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait(10.0 if action == "wait" else None)  # or for ever


def _epoch(command: Command) -> int | None:
    match command:
        case Pretrain():
            return command.action.epoch
        case SendCandidateState():
            return command.round.action.epoch
        case MainTrain():
            return command.epoch
    return None


@dataclass(frozen=True)
class FaultyHandler:
    """Fails, or executes a command as its handler does."""

    handler: Handler
    faults: Faults
    role: str
    index: int

    def handle(self, command: Command, on_step: OnStep) -> Any:
        return self.handler.handle(
            command, self.faults.inject(self.role, self.index, command, on_step)
        )

    def close(self) -> None:
        self.handler.close()


@dataclass(frozen=True)
class FaultyProgram(SynchronousProgram):
    """A program whose residents fail."""

    program: SynchronousProgram
    faults: Faults

    @property
    def forms_group(self) -> bool:  # type: ignore[override]
        return self.program.forms_group

    def trainer(self, config: ResidentConfig) -> Callable[..., Any]:
        return self.program.trainer(config)

    def join_group(self, context: TrainContext) -> Group:
        return self.program.join_group(context)

    def make_handler(self, config: ResidentConfig, context: TrainContext, group: Group) -> Handler:
        handler = self.program.make_handler(config, context, group)
        return FaultyHandler(handler, self.faults, WORKER_POOL, context.get_world_rank())

    def make_slot(self, config: ResidentConfig, index: int) -> Handler:
        handler = self.program.make_slot(config, index)
        return FaultyHandler(handler, self.faults, SLOT_POOL, index)


@contextmanager
def injected(faults: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Let runs on Ray that start inside the block meet these faults."""
    from raytrain_opt.execution import start  # not in residents: it imports torch

    def make(**settings: Any) -> ResidentConfig:
        return planned.install(ResidentConfig(**settings))

    with TemporaryDirectory() as folder, mock.patch.object(start, "ResidentConfig", make):
        planned = Faults([Fault(**fault) for fault in faults], folder)
        yield


if __name__ == "__main__":
    from raytrain_opt.cli import main

    # Imported by its name: what is pickled must not be in `__main__` of a resident.
    from tests.support.faults import injected as injected_by_name

    with injected_by_name(json.loads(sys.argv.pop(1))):
        main(prog_name="raytrain-opt")
