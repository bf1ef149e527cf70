"""What a resident slot does: train candidates alone, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from raytrain_opt.config.learning_rate import CandidateBatch
from raytrain_opt.optim.scaling import linear_scaling
from raytrain_opt.pools.candidates import CandidateTrainer
from raytrain_opt.pools.protocol import States
from raytrain_opt.search.policy import Candidate, TryCandidates
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.micro_batches import MicroBatches


class Slot(CandidateTrainer):
    """One slot.

    `candidate_batch`: what a slot computes of each global batch. `local`: as much as one worker,
    at the rate that a batch so much smaller needs (linear scaling); else all micro-batches.
    """

    def __init__(
        self, learner: Learner, index: int, states: States, candidate_batch: CandidateBatch | None
    ) -> None:
        count = learner.config.micro_batches
        computed = count // learner.config.worker_count if candidate_batch == "local" else count
        indices = range(computed)
        super().__init__(learner, index, states, MicroBatches(indices, count))

    def _lrs(self, plan: TryCandidates, candidate: Candidate) -> Sequence[float]:
        computed, count = len(self._micro_batches.indices), self._micro_batches.count
        return [linear_scaling(lr, computed, count) for lr in candidate.lrs(plan)]
