"""What a resident slot does: train candidates, score them, send the state of the winner.

Free of Ray: it is given access to states (`protocol.States`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from raytrain_opt.clock import Stopwatch
from raytrain_opt.config.learning_rate import CandidateBatch
from raytrain_opt.optim.scaling import linear_scaling
from raytrain_opt.pools.commands import Pretrain, PretrainReply, SendCandidateState, StateRef
from raytrain_opt.pools.handler import LearnerHandler, OnStep
from raytrain_opt.pools.protocol import States
from raytrain_opt.results import TrainTotals
from raytrain_opt.search.policy import Candidate, CandidateResult, TryCandidates
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.micro_batches import MicroBatches
from raytrain_opt.train.state import TrainingState


class Slot(LearnerHandler):
    """One slot. It keeps the states of its candidates until the next round.

    `candidate_batch`: what a slot computes of each global batch. `local`: one micro-batch, at the
    rate that a batch so much smaller needs (linear scaling); else all micro-batches.
    """

    def __init__(
        self, learner: Learner, index: int, states: States, candidate_batch: CandidateBatch | None
    ) -> None:
        super().__init__(learner, index, states)
        count = learner.config.worker_count
        indices = range(1 if candidate_batch == "local" else count)
        self._micro_batches = MicroBatches(indices, count)
        self._kept_states: dict[int, TrainingState] = {}
        self._live_candidate: int | None = None  # whose state the learner has

    def actions(self) -> dict[type[Any], Callable[[Any, OnStep], Any]]:
        """Return what to do with each kind of command."""
        return super().actions() | {
            Pretrain: self._pretrain,
            SendCandidateState: self._send_candidate_state,
        }

    def _pretrain(self, command: Pretrain, on_step: OnStep) -> PretrainReply:
        stopwatch, plan = Stopwatch(), command.plan
        if self.index not in command.slots:  # given up by the driver, but only slow
            return PretrainReply((), {})
        self._kept_states.clear()
        self._live_candidate = None
        with stopwatch.measure("load_s"):
            start = self.states.get(command.state)
        candidates = command.candidates_of(self.index)
        total = len(candidates) * plan.pretrain_steps
        results = []
        for number, candidate in enumerate(candidates):
            with stopwatch.measure("load_s"):
                self.learner.load(start)
            offset = number * plan.pretrain_steps
            results.append(self._try(plan, candidate, _shifted(on_step, offset, total)))
            if plan.keeps_winner:
                self._live_candidate = candidate.index
                if number + 1 < len(candidates):  # the last state stays in the learner
                    with stopwatch.measure("stash_s"):
                        self._kept_states[candidate.index] = self.learner.state(copy=True)
        timings_s = stopwatch.timings_s
        timings_s["compute_s"] = sum(result.train_s for result in results)
        timings_s["score_s"] = sum(result.score_s for result in results)
        return PretrainReply(tuple(results), timings_s)

    def _try(
        self, plan: TryCandidates, candidate: Candidate, on_step: Callable[[int], None]
    ) -> CandidateResult:
        """Train the candidate and score it."""
        trained = self._train(plan, candidate, on_step)
        score = self.learner.evaluate("validation", blocks=plan.paired)
        return CandidateResult.of(candidate, trained, score, self.index)

    def _train(
        self, plan: TryCandidates, candidate: Candidate, on_step: Callable[[int], None]
    ) -> TrainTotals:
        computed, count = len(self._micro_batches.indices), self._micro_batches.count
        totals = self.learner.train(
            plan.epoch,
            0,
            [linear_scaling(lr, computed, count) for lr in candidate.lrs(plan)],
            self._micro_batches,
            on_step,
            candidate.weight_decay_factor * plan.weight_decay_scale,
            candidate.optimizer,
            search=True,
        )
        if self.learner.averages_weights or plan.fresh_statistics:
            self.learner.sync_batch_norm_stats(fresh=plan.fresh_statistics)
        return totals

    def _send_candidate_state(
        self, command: SendCandidateState, _on_step: OnStep
    ) -> StateRef | None:
        ref = None
        if command.slot == self.index:
            self._make_live(command)
            ref = self._store_and_hash(
                f"{command.round.plan.epoch}.candidate{command.candidate.index}"
            )
        self.learner.release_memory()
        return ref

    def _make_live(self, command: SendCandidateState) -> None:
        """Load the candidate's state into the learner; train it again if it is gone.

        A slot that was restarted, or that stands in for another one, has no state to send.
        """
        candidate = command.candidate
        if candidate.index == self._live_candidate:
            return
        if candidate.index in self._kept_states:
            self.learner.load(self._kept_states[candidate.index])
        else:
            plan = command.round.plan
            self.learner.load(self.states.get(command.round.state))
            self._train(plan, candidate, lambda _: None)
        self._live_candidate = candidate.index

    def _store_and_hash(self, state_id: str) -> StateRef:
        """Store the state and compute its digest side by side: both release Python's lock."""
        state = self.learner.state(copy=False)
        with ThreadPoolExecutor(1) as executor:
            digest = executor.submit(state.digest)
            ref = self.states.put(state_id, state)
            return replace(ref, sha256=digest.result())


def _shifted(on_step: OnStep, offset: int, total: int) -> Callable[[int], None]:
    return lambda done: on_step(offset + done, total)
