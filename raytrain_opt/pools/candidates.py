"""Execute commands with a learner; train candidates, alone or together, and score them.

Slots train candidates alone, workers together (`worker`). Free of Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from raytrain_opt.errors import origin
from raytrain_opt.pools.commands import (
    Command,
    Evaluate,
    OnStep,
    Pretrain,
    SendCandidateState,
    SendInitialState,
    StateRef,
)
from raytrain_opt.pools.protocol import States
from raytrain_opt.results import EvalTotals, Steps, TrainTotals
from raytrain_opt.search.policy import Candidate, CandidateResult, TryCandidates
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.micro_batches import MicroBatches
from raytrain_opt.train.phase import lone_failure
from raytrain_opt.train.state import TrainingState

# Of the rate of a candidate that shows whether an exception depends on the rate.
_CONTROL_FACTOR = 1e-9


class LearnerHandler:
    """Executes commands with a learner; loads a state only when a command needs another one."""

    def __init__(self, learner: Learner, index: int, states: States) -> None:
        self.learner, self.index, self.states = learner, index, states
        self._live_id = ""
        self._origin = ""  # of a phase that goes on with the next command: the state since which

    def handle(self, command: Command, on_step: OnStep) -> Any:
        """Execute a command; return the reply. Frees cached memory between phases."""
        try:
            return self._execute(command, on_step)
        except Exception as error:
            error.add_note(f"at {origin(error)}, {self.learner.position} in {command.name}")
            raise
        finally:
            if not self._origin:
                self.learner.release_memory()

    @property
    def failure(self) -> Exception | None:
        """Why a command that hangs may wait for others in vain: what made its phase fail."""
        failure = self.learner.failure
        return None if failure is None else lone_failure(failure)

    def close(self) -> None:
        self.learner.close()

    def forget_state(self) -> None:
        """Load the next state in any case: another handler has used the learner."""
        self._live_id = self._origin = ""

    def _execute(self, command: Command, on_step: OnStep) -> Any:
        """Execute the commands of every resident; subclasses add theirs."""
        if isinstance(command, SendInitialState):
            return self._send_state("initial") if self.index == command.index else None
        raise TypeError(f"{type(self).__name__} executes no {command.name}")

    def _send_state(self, state_id: str) -> StateRef:
        return self.states.put(state_id, self.learner.state(copy=False))

    def _load(self, ref: StateRef) -> None:
        """Load a state that is not the learner's already."""
        if ref.id != self._live_id:
            self._load_into_learner(ref)
            self._live_id = ref.id

    def _load_into_learner(self, ref: StateRef) -> None:
        self.learner.load(self.states.get(ref))

    def _evaluate_part(
        self, command: Evaluate, part: int, parts: int, on_step: OnStep
    ) -> EvalTotals:
        self._load(command.state)
        return self.learner.evaluate(command.split, part, parts, on_step)


class CandidateTrainer(LearnerHandler):
    """Trains candidates from one state and keeps the best state in host memory.

    `index`: number of the slot or rank of the worker. `micro_batches`: what it, or its group,
    computes of each global batch. `world_size`: of the process group in which all train each
    candidate together; None for a slot, which trains alone.
    """

    def __init__(
        self,
        learner: Learner,
        index: int,
        states: States,
        micro_batches: MicroBatches,
        world_size: int | None = None,
    ) -> None:
        super().__init__(learner, index, states)
        self._micro_batches = micro_batches
        self._alone = world_size is None
        self._rank, self.world_size = (0, 1) if world_size is None else (index, world_size)
        self._kept_states: dict[int, TrainingState] = {}
        self._live_candidate: int | None = None  # whose state the learner has
        self._have_trained = False  # any candidates without an exception

    def _execute(self, command: Command, on_step: OnStep) -> Any:
        match command:
            case Pretrain():
                return self._pretrain(command, on_step)
            case SendCandidateState():
                return self._send_candidate_state(command, on_step)
        return super()._execute(command, on_step)

    def _forget_candidates(self) -> None:
        self._kept_states.clear()
        self._live_candidate = None
        self._live_id = ""

    def _pretrain(self, command: Pretrain, on_step: OnStep) -> tuple[CandidateResult, ...]:
        plan = command.plan
        candidates = command.candidates_of(self.index) if self._alone else plan.candidates
        self._forget_candidates()
        start = self.states.get(command.state)
        total = len(candidates) * plan.pretrain_steps
        results: list[CandidateResult] = []
        for number, candidate in enumerate(candidates):
            if number:
                self._keep_best(plan, results)
            self.learner.load(start)
            offset = number * plan.pretrain_steps
            results.append(self._try(plan, candidate, _shifted(on_step, offset, total)))
            self._live_candidate = candidate.index
        # Where others have trained, the search goes on without these.
        self._have_trained |= not all(result.failure for result in results)
        if results and not self._have_trained:
            self.learner.load(start)
            self._try_control(plan, _shifted(on_step, total, total))
        # The results of a group are the same on all ranks.
        return () if self._rank else tuple(results)

    def _try_control(self, plan: TryCandidates, on_step: Callable[[int], object]) -> None:
        """Raise what every candidate raised, if one that hardly changes the weights does, too."""
        smallest = min(plan.candidates, key=lambda candidate: candidate.lr)
        control = replace(smallest, lr=smallest.lr * _CONTROL_FACTOR)
        self._try(plan, control, on_step)
        self._live_candidate = None
        if self.learner.failure is not None:
            raise self.learner.failure

    def _keep_best(self, plan: TryCandidates, results: Sequence[CandidateResult]) -> None:
        """Keep the last state if it is the best so far, and no other."""
        best = plan.best(results).candidate.index
        if plan.keeps_winner and best == self._live_candidate:
            self._kept_states = {best: self.learner.state(copy=True)}

    def _try(
        self, plan: TryCandidates, candidate: Candidate, on_step: Callable[[int], object]
    ) -> CandidateResult:
        learner, slot = self.learner, self.index if self._alone else -1
        trained = self._train(plan, candidate, on_step)
        part = learner.evaluate("validation", self._rank, self.world_size)
        scored = learner.add_ranks(part)
        return CandidateResult.of(candidate, trained, scored, slot)

    def _train(
        self, plan: TryCandidates, candidate: Candidate, on_step: Callable[[int], object]
    ) -> TrainTotals:
        totals = self.learner.train(
            plan.epoch, self._steps(plan, candidate), self._micro_batches, on_step, search=True
        )
        self.learner.finish_phase(fresh=plan.fresh_statistics)
        return totals

    def _steps(self, plan: TryCandidates, candidate: Candidate) -> Steps:
        return candidate.steps(plan)

    def _send_candidate_state(
        self, command: SendCandidateState, on_step: OnStep
    ) -> StateRef | None:
        """Continue from the candidate; the named slot, or rank 0 of a group, sends its state."""
        if self._alone and self.index != command.slot:
            return None
        self._make_live(command, on_step)
        state_id = f"{command.round.plan.epoch}.candidate{command.candidate.index}"
        self._live_id = state_id
        return self._send_state(state_id) if self._rank == 0 else None

    def _make_live(self, command: SendCandidateState, on_step: OnStep) -> None:
        """Load the candidate's state, or train it again in a process that never had it."""
        candidate = command.candidate
        if candidate.index == self._live_candidate:
            return
        if candidate.index in self._kept_states:
            self.learner.load(self._kept_states[candidate.index])
        else:
            plan = command.round.plan
            self.learner.load(self.states.get(command.round.state))
            self._train(plan, candidate, _shifted(on_step, 0, plan.pretrain_steps))
        self._live_candidate = candidate.index


def _shifted(on_step: OnStep, offset: int, total: int) -> Callable[[int], object]:
    return lambda done: on_step(offset + done, total)
