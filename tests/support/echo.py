"""Residents that compute nothing, for failures of processes.

Workers are a process group, as in a run. Importing this imports no torch, so that a slot starts in
a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from raytrain_opt.pools.commands import (
    Command,
    Evaluate,
    MainTrain,
    OnStep,
    Pretrain,
    SendCandidateState,
)
from raytrain_opt.pools.programs import ResidentConfig, SynchronousProgram
from raytrain_opt.pools.resident import Group
from raytrain_opt.pools.state_store import GroupObjectStore, ObjectStore

# Of each command.
STEPS = 8
# Contents of states: of the driver's, which commands start from, of one that workers trained from
# it, and of a slot's candidate.
DRIVERS, TRAINED, CANDIDATE = b"the driver's", b"the driver's, trained", b"a candidate's"
# Any object can be stored, here bytes.
STATES: Any = ObjectStore()


@dataclass(frozen=True)
class Done:
    """The reply to a command: its name, and the content of the state that it started from."""

    name: str
    content: bytes


class Echo:
    """Makes the steps of each command and replies with a state, or the content of its state.

    Raises in `send_initial_state`, as a user's function would.
    """

    def __init__(self, states: Any = STATES) -> None:
        self.states = states

    def handle(self, command: Command, on_step: OnStep) -> Any:
        for done in range(STEPS):
            on_step(done, STEPS)
        match command:
            case SendCandidateState():
                return STATES.put("candidate", CANDIDATE)
            case MainTrain():
                content = self.states.get(command.state) + b", trained"
                return self.states.put(f"{command.epoch}", content)
            case Pretrain() | Evaluate():
                return Done(command.name, self.states.get(command.state))
        raise ValueError("planted failure")

    def close(self) -> None: ...


@dataclass(frozen=True)
class EchoProgram(SynchronousProgram):
    """Its residents echo. `environment`: of the processes of workers."""

    environment: Mapping[str, str] = field(default_factory=dict)

    def trainer(self, config: ResidentConfig) -> Callable[..., Any]:
        make_trainer = super().trainer(config)

        def make(**arguments: Any) -> Any:
            arguments["run_config"].worker_runtime_env = {"env_vars": dict(self.environment)}
            return make_trainer(**arguments)

        return make

    def make_handler(self, config: ResidentConfig, context: Any, group: Group) -> Echo:
        return Echo(GroupObjectStore(group))

    def make_slot(self, config: ResidentConfig, index: int) -> Echo:
        return Echo()
