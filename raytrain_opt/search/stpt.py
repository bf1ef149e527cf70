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

from raytrain_opt.config.learning_rate import LR_SETS, StptPolicy, Warmup
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
# Table 4 of the paper, for 40 epochs: last epoch of the warm-up, and of narrow and middle.
_MIX_EPOCHS, _MIX_WARMUP, _MIX_ENDS = 40, 4, (19, 29)


@dataclass(frozen=True)
class Stpt(Policy):
    """The published rule, configured by a section of the job file."""

    section: StptPolicy
    epochs: int
    steps: EpochSteps

    def __post_init__(self) -> None:
        # Epochs get shorter with a batch ramp: the last one is the shortest.
        shortest = self.steps(self.epochs)
        if self.alpha_steps(self.epochs) > shortest:
            rule = f"longer than an epoch, which has {shortest} iterations"
            raise JobError([Problem("learning_rate.alpha", rule, str(self.section.alpha))])

    def alpha_steps(self, epoch: int) -> int:
        """Return the steps of a pre-training: alpha itself, or that fraction of the epoch."""
        alpha = self.section.alpha
        return alpha if isinstance(alpha, int) else max(1, round(alpha * self.steps(epoch)))

    @property
    def warmup(self) -> Warmup:
        """The job's warm-up; by default the paper's for mix (4 of 40 epochs), else none."""
        if self.section.warmup is not None:
            return self.section.warmup
        epochs = round(_MIX_WARMUP * self.epochs / _MIX_EPOCHS)
        return Warmup(epochs=epochs if self.section.candidates == "mix" else 0)

    @property
    def search_updates(self) -> float:
        epochs = range(self.warmup.epochs + 1, self.epochs + 1)
        return sum(len(self.multipliers(e)) * self.alpha_steps(e) for e in epochs)

    def multipliers(self, epoch: int) -> tuple[float, ...]:
        """Return the multipliers of `epoch`, counted from 1."""
        own = self.section.candidates
        if isinstance(own, list):
            return tuple(own)
        if own != "mix":
            return LR_SETS[own]
        ends = (round(last * self.epochs / _MIX_EPOCHS) for last in _MIX_ENDS)
        return LR_SETS[("narrow", "middle", "wide")[sum(epoch > end for end in ends)]]

    def next(self, epoch: int, history: History) -> TryCandidates | TrainEpoch:
        """Begin epochs after the warm-up with a round. Raises DivergedError after all halvings."""
        if epoch <= self.warmup.epochs:
            return self._train_warmup(epoch)
        if len(self.multipliers(epoch)) == 1:
            return self._train_without_search(epoch)
        if history.is_decided(epoch):
            decision, beta = history.decisions[-1], self.steps(epoch) - self.alpha_steps(epoch)
            return TrainEpoch(epoch, self.steps.last(epoch, (decision.next_base_lr,) * beta))
        self._raise_if_all_diverged(epoch, history)
        base_lr = history.latest.next_base_lr if history.latest else self.section.initial
        candidates = tuple(
            Candidate(index, multiplier, base_lr * multiplier)
            for index, multiplier in enumerate(self.multipliers(epoch))
        )
        alpha = self.alpha_steps(epoch)
        reason = f"pre-train {len(candidates)} candidates for {alpha} iterations"
        shape = (1.0,) * alpha
        return TryCandidates(
            epoch, base_lr, reason, candidates, shape, "val_metric", keeps_winner=True
        )

    def _train_without_search(self, epoch: int) -> TrainEpoch:
        """Return an epoch with a single candidate (m = 1): its multiplier still accumulates."""
        (multiplier,) = self.multipliers(epoch)
        lr = self.section.initial * multiplier ** (epoch - self.warmup.epochs)
        return TrainEpoch(epoch, Steps(0, (lr,) * self.steps(epoch)))

    def _train_warmup(self, epoch: int) -> TrainEpoch:
        per_epoch, count, warmup = self.steps.first, self.steps(epoch), self.warmup
        first, total = (epoch - 1) * per_epoch, warmup.epochs * per_epoch
        steps = (first + step * per_epoch / count for step in range(count))
        lrs = tuple(warmup_lr(warmup, self.section.initial, step, total) for step in steps)
        return TrainEpoch(epoch, Steps(0, lrs))

    def _raise_if_all_diverged(self, epoch: int, history: History) -> None:
        failed = [decision for decision in history.rounds_of(epoch) if decision.winner is None]
        if len(failed) > _MAX_HALVINGS:
            tried = [result for decision in failed for result in decision.tried]
            raise all_diverged(epoch, (decision.base_lr for decision in failed), tried)

    def decide(
        self, action: TryCandidates, results: Sequence[CandidateResult], history: History
    ) -> Decision:
        """Choose the highest score; break ties by the multiplier closest to 1.0."""
        # A loss that is not finite scores minus infinity; the paper does not say what if all do.
        scores = tuple(map(action.score_of, results))
        if not any(is_finite(score) for score in scores):
            reason = f"all {len(results)} candidates diverged: base rate halved"
            lr, tried = action.base_lr, tuple(results)
            return Decision(action.epoch, lr, scores, None, lr / 2, reason, tried=tried)
        winner, tied = action.best(results), scores.count(max(scores))
        reason = f"best validation {winner.metric.name} of {len(results)}"
        if tied > 1:
            reason += f"; {tied} tied, multiplier closest to 1.0 taken"
        lr = winner.candidate.lr
        return Decision(action.epoch, action.base_lr, scores, winner, lr, reason)
