"""Execute commands with a learner; train candidates, alone or together, and score them.

Slots train candidates alone, workers together (`worker`). Free of Ray.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from raytrain_opt.errors import origin
from raytrain_opt.pools.commands import (
    CandidatePart,
    Command,
    Evaluate,
    OnStep,
    Pretrain,
    SendCandidateState,
    SendInitialState,
    StateRef,
)
from raytrain_opt.pools.interface import States
from raytrain_opt.results import EvalTotals, Steps, TrainTotals
from raytrain_opt.search.policy import Candidate, CandidateResult, TryCandidates
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.micro_batches import MicroBatches
from raytrain_opt.train.state import TrainingState

# Of the rate of a candidate that shows whether an exception depends on the rate.
_CONTROL_FACTOR = 1e-9


class LearnerHandler:
    """Executes commands with a learner; loads a state only when a command needs another one."""

    def __init__(self, learner: Learner, index: int, states: States) -> None:
        self.learner, self.index, self.states = learner, index, states
        self._live_id = ""
        # Phases that the last command has left under way, and that the current one will; or None.
        self._phase: object = None
        self._leaves: object = None

    def handle(self, command: Command, on_step: OnStep) -> Any:
        """Execute a command; return the reply. Frees cached memory between phases."""
        try:
            return self._execute(command, on_step)
        except Exception as error:
            error.add_note(f"at {origin(error)}, {self.learner.position} in {command.name}")
            raise
        finally:
            self._phase, self._leaves = self._leaves, None
            if self._phase is None:
                self.learner.release_memory()

    def close(self) -> None:
        self.learner.close()

    def forget_state(self) -> None:
        """Load the next state in any case: another handler has used the learner."""
        self._live_id, self._phase = "", None

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
        self._round: tuple[str, TryCandidates] | None = None  # start and action of the latest
        self._results: list[CandidateResult] = []  # of this resident, in that round
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
        self._round, self._results = None, []
        self._kept_states.clear()
        self._live_candidate, self._live_id = None, ""

    def _pretrain(
        self, command: Pretrain, on_step: OnStep
    ) -> CandidateResult | CandidatePart | None:
        candidate = command.wave.get(self.index if self._alone else 0)
        if candidate is None:  # the driver gave this slot up, or the wave is smaller
            return None
        action, left = command.action, command.left(candidate)
        total = action.pretrain_steps
        here = (command.state.id, action, candidate, left)
        if self._phase != here:
            self._begin_candidate(command, candidate, total - left)
        end = min(command.end, left)
        self.learner.advance(end, lambda done: on_step(total - left + done, total))
        if not command.sends:
            self._leaves = here
            return None
        if end < left:
            return self._send_part(command, candidate)
        return self._finish_candidate(command, candidate, on_step)

    def _begin_candidate(self, command: Pretrain, candidate: Candidate, done: int) -> None:
        """Begin the candidate's steps after those that are `done`."""
        action, part = command.action, command.parts.get(candidate.index)
        if self._round != (command.state.id, action):
            self._forget_candidates()
            self._round = command.state.id, action
        self._keep_best(action)
        self._live_candidate, self._live_id = None, ""
        self.learner.load(self.states.get(command.state if part is None else part.state))
        steps = self._steps(action, candidate).after(done)
        self.learner.begin(action.epoch, steps, self._micro_batches, search=True)

    def _send_part(self, command: Pretrain, candidate: Candidate) -> CandidatePart | None:
        totals = self._totals(command, candidate, self.learner.take_totals())
        action, done = command.action, totals.steps
        self._leaves = (command.state.id, action, candidate, action.pretrain_steps - done)
        if self._rank:
            return None
        name = f"{_candidate_id(action, candidate)}.{done}"
        return CandidatePart(totals, self._send_state(name))

    def _finish_candidate(
        self, command: Pretrain, candidate: Candidate, on_step: OnStep
    ) -> CandidateResult | None:
        action, learner = command.action, self.learner
        trained = self._totals(command, candidate, learner.end())
        learner.finish_phase(fresh=action.fresh_statistics)
        result = self._score(candidate, trained)
        self._live_candidate = candidate.index
        self._results.append(result)
        # Where others have trained, the search goes on without these.
        self._have_trained |= not result.failure
        if not self._have_trained:
            learner.load(self.states.get(command.state))
            total = action.pretrain_steps
            self._try_control(action, lambda done, more: on_step(total + done, total + more))
        # The results of a group are the same on all ranks.
        return None if self._rank else result

    def _totals(self, command: Pretrain, candidate: Candidate, later: TrainTotals) -> TrainTotals:
        part = command.parts.get(candidate.index)
        return later if part is None else part.totals.plus(later)

    def _try_control(self, action: TryCandidates, on_step: OnStep) -> None:
        """Raise what every candidate raised, if one that hardly changes the weights does, too."""
        smallest = min(action.candidates, key=lambda candidate: candidate.lr)
        control = replace(smallest, lr=smallest.lr * _CONTROL_FACTOR)
        self._score(control, self._train(action, control, on_step))
        self._live_candidate = None
        if self.learner.failure is not None:
            raise self.learner.failure
        self._have_trained = True

    def _keep_best(self, action: TryCandidates) -> None:
        """Keep the last state if it is the best so far, and no other."""
        if not action.keeps_winner or not self._results:
            return
        if (best := action.best(self._results).candidate.index) == self._live_candidate:
            self._kept_states = {best: self.learner.state(copy=True)}

    def _score(self, candidate: Candidate, trained: TrainTotals) -> CandidateResult:
        part = self.learner.evaluate("validation", self._rank, self.world_size)
        scored = self.learner.add_ranks(part)
        return CandidateResult.of(candidate, trained, scored, self.index if self._alone else -1)

    def _train(self, action: TryCandidates, candidate: Candidate, on_step: OnStep) -> TrainTotals:
        """Train a whole candidate from the learner's state."""
        epoch, steps, total = action.epoch, self._steps(action, candidate), action.pretrain_steps
        trained = self.learner.train(
            epoch, steps, self._micro_batches, lambda done: on_step(done, total), search=True
        )
        self.learner.finish_phase(fresh=action.fresh_statistics)
        return trained

    def _steps(self, action: TryCandidates, candidate: Candidate) -> Steps:
        return candidate.steps(action)

    def _send_candidate_state(
        self, command: SendCandidateState, on_step: OnStep
    ) -> StateRef | None:
        """Continue from the candidate; the named slot, or rank 0 of a group, sends its state."""
        if self._alone and self.index != command.slot:
            return None
        self._make_live(command, on_step)
        self._live_id = _candidate_id(command.round.action, command.candidate)
        return self._send_state(self._live_id) if self._rank == 0 else None

    def _make_live(self, command: SendCandidateState, on_step: OnStep) -> None:
        """Load the candidate's state, or train it again in a process that never had it."""
        candidate, round_ = command.candidate, command.round
        if self._round != (round_.state.id, round_.action):
            self._forget_candidates()
        if candidate.index == self._live_candidate:
            return
        if candidate.index in self._kept_states:
            self.learner.load(self._kept_states[candidate.index])
        else:
            self.learner.load(self.states.get(round_.state))
            self._train(round_.action, candidate, on_step)
        self._live_candidate = candidate.index


def _candidate_id(action: TryCandidates, candidate: Candidate) -> str:
    return f"{action.epoch}.candidate{candidate.index}"
