"""What workers, asynchronous workers and slots have in common. Free of Ray."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raytrain_opt.errors import origin
from raytrain_opt.pools.commands import Command, Evaluate, OnStep, SendInitialState, StateRef
from raytrain_opt.pools.protocol import States
from raytrain_opt.results import EvalTotals
from raytrain_opt.train.learner import Learner


class LearnerHandler:
    """Executes commands with a learner; loads a state only when a command needs another one."""

    def __init__(self, learner: Learner, index: int, states: States) -> None:
        self.learner, self.index, self.states = learner, index, states
        self._live_id = ""

    def handle(self, command: Command, on_step: OnStep) -> Any:
        """Execute a command by the method of its name; return the reply, free cached memory."""
        try:
            return getattr(self, f"_{command.name}")(command, on_step)
        except Exception as error:
            error.add_note(f"at {origin(error)}, {self.learner.position} in {command.name}")
            raise
        finally:
            self.learner.release_memory()

    def steps_before_failure(self, _: Command) -> Callable[[], object] | None:
        """Return None: what is repeated gives the same bits."""
        return None

    def close(self) -> None:
        """End loader processes."""
        self.learner.close()

    def forget_state(self) -> None:
        """Load the next state in any case: another handler has used the learner."""
        self._live_id = ""

    def _send_initial_state(self, command: SendInitialState, _: OnStep) -> StateRef | None:
        return self._send_state("initial") if self.index == command.index else None

    def _send_state(self, state_id: str) -> StateRef:
        return self.states.put(state_id, self.learner.state(copy=False))

    def _load(self, ref: StateRef) -> bool:
        """Load a state; return whether that was necessary."""
        if ref.id == self._live_id:
            return False
        self._load_into_learner(ref)
        self._live_id = ref.id
        return True

    def _load_into_learner(self, ref: StateRef) -> None:
        self.learner.load(self.states.get(ref))

    def _evaluate_part(
        self, command: Evaluate, part: int, parts: int, on_step: OnStep
    ) -> EvalTotals:
        """Evaluate one of `parts` parts of the split."""
        self._load(command.state)
        return self.learner.evaluate(command.split, part, parts, on_step)
