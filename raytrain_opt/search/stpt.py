"""STPT: choose each epoch's learning rate by short pre-training.

Source: Yamada et al. (Kobe University), adaptive learning rate by short-term pre-training
in data-parallel deep learning, algorithm 1, tables 1 to 4. Where the paper leaves a case open, a
comment says what this implementation does.

    m, alpha, beta   candidates, `alpha_steps`, `steps - alpha_steps`
    LR candidate     multiplier; effective LR = base LR x multiplier
    best LR          `Decision.winner.candidate.lr`; the next epoch's base LR
    Mix              warm-up, then narrow, middle, wide at scaled epoch boundaries
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytrain_opt.config.learning_rate import StptPolicy, Warmup
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.optim.epoch_steps import EpochSteps
from raytrain_opt.optim.schedules import warmup_lr
from raytrain_opt.results import Steps
from raytrain_opt.search.policy import (
    Candidate,
    CandidateResult,
    Decision,
    History,
    Policy,
    TrainEpoch,
    TryCandidates,
    all_diverged,
    is_finite,
)

# How often a round is repeated at half the rate if all its candidates diverge.
_MAX_HALVINGS = 5


@dataclass(frozen=True)
class Stpt(Policy):
    """The published rule, configured by a section of the job file."""

    section: StptPolicy
    epochs: int
    steps: EpochSteps

    def __post_init__(self) -> None:
        # Epochs get shorter with a batch ramp: the last one is the shortest.
        shortest = self.steps(self.epochs)
        if self.section.alpha_steps(shortest) > shortest:
            rule = f"longer than an epoch, which has {shortest} iterations"
            raise JobError([Problem("learning_rate.alpha", rule, str(self.section.alpha))])

    @property
    def warmup(self) -> Warmup:
        return self.section.warmup_in(self.epochs)

    @property
    def search_updates(self) -> float:
        epochs = range(self.warmup.epochs + 1, self.epochs + 1)
        steps = sum(self.section.alpha_steps(self.steps(epoch)) for epoch in epochs)
        return steps * (len(self.section.multipliers(1, self.epochs)) - 1)  # the winner's are kept

    def next(self, epoch: int, history: History) -> TryCandidates | TrainEpoch:
        """Begin epochs after the warm-up with a round. Raises DivergedError after all halvings."""
        if epoch <= self.warmup.epochs:
            return self._train_warmup(epoch)
        multipliers, steps = self.section.multipliers(epoch, self.epochs), self.steps(epoch)
        if len(multipliers) == 1:  # no search (m = 1): the multiplier still accumulates
            lr = self.section.initial * multipliers[0] ** (epoch - self.warmup.epochs)
            return TrainEpoch(epoch, Steps(0, (lr,) * steps))
        alpha = self.section.alpha_steps(steps)
        if history.is_decided(epoch):
            lrs = (history.decisions[-1].next_base_lr,) * (steps - alpha)
            return TrainEpoch(epoch, self.steps.last(epoch, lrs))
        failed = [decision for decision in history.rounds_of(epoch) if decision.winner is None]
        if len(failed) > _MAX_HALVINGS:
            tried = [result for decision in failed for result in decision.tried]
            raise all_diverged(epoch, (decision.base_lr for decision in failed), tried)
        base_lr = history.latest.next_base_lr if history.latest else self.section.initial
        candidates = tuple(
            Candidate(i, factor, base_lr * factor) for i, factor in enumerate(multipliers)
        )
        return TryCandidates(
            epoch, base_lr, candidates, (1.0,) * alpha, "val_metric", keeps_winner=True
        )

    def _train_warmup(self, epoch: int) -> TrainEpoch:
        per_epoch, count, warmup = self.steps.first, self.steps(epoch), self.warmup
        first, total = (epoch - 1) * per_epoch, warmup.epochs * per_epoch
        steps = (first + step * per_epoch / count for step in range(count))
        lrs = tuple(warmup_lr(warmup, self.section.initial, step, total) for step in steps)
        return TrainEpoch(epoch, Steps(0, lrs))

    def decide(
        self, action: TryCandidates, results: Sequence[CandidateResult], history: History
    ) -> Decision:
        """Choose the highest score; break ties by the multiplier closest to 1.0."""
        # A loss that is not finite scores minus infinity; the paper does not say what if all do.
        scores = tuple(map(action.score_of, results))
        if not any(is_finite(score) for score in scores):
            reason = f"all {len(results)} candidates diverged: base rate halved"
            lr, tried = action.base_lr, tuple(results)
            return Decision(action.epoch, lr, None, lr / 2, reason, tried=tried)
        winner, tied = action.best(results), scores.count(max(scores))
        reason = f"best validation {winner.metric.name} of {len(results)}"
        if tied > 1:
            reason += f"; {tied} tied, multiplier closest to 1.0 taken"
        lr = winner.candidate.lr
        return Decision(action.epoch, action.base_lr, winner, lr, reason)
