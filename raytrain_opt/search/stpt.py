"""STPT: choose each epoch's learning rate by short pre-training.

Source: Yamada et al. (Kobe University), adaptive learning rate by short-term pre-training
in data-parallel deep learning, algorithm 1, tables 1 to 4. Where the paper is silent, the
comment says what we do.

| paper        | here                                                              |
|--------------|-------------------------------------------------------------------|
| m            | number of candidates                                              |
| alpha, beta  | `alpha_steps`, `steps - alpha_steps`                              |
| LR candidate | multiplier; effective LR = base LR x multiplier                   |
| best LR      | `Round.winner.candidate.lr`; the next epoch's base LR             |
| Mix          | warm-up, then narrow, middle, wide at scaled epoch boundaries     |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytrain_opt.config.learning_rate import LR_SETS, StptPolicy, Warmup
from raytrain_opt.errors import DivergedError, JobError, Problem
from raytrain_opt.optim.batch_ramp import EpochSteps
from raytrain_opt.optim.schedules import warmup_lrs
from raytrain_opt.search.combine import members_of_average
from raytrain_opt.search.policy import (
    Candidate,
    CandidateResult,
    Plan,
    Round,
    is_decided,
    is_finite,
)

# Table 4 of the paper, for 40 epochs: last epoch of the warm-up, of narrow and of middle.
_MIX_EPOCHS, _MIX_WARMUP, _MIX_NARROW, _MIX_MIDDLE = 40, 4, 19, 29


@dataclass(frozen=True)
class Stpt:
    """The published rule, with the section of the job file that sets it."""

    section: StptPolicy
    epochs: int
    steps: EpochSteps

    def __post_init__(self) -> None:
        least = self.steps(self.epochs)
        if self.alpha_steps(self.epochs) > least:
            rule = f"longer than an epoch, which has {least} iterations"
            problem = Problem("learning_rate.alpha", rule, str(self.section.alpha))
            raise JobError([problem])

    def alpha_steps(self, epoch: int) -> int:
        """Iterations of a pre-training: given, or a share of the epoch (at least one)."""
        alpha = self.section.alpha
        return alpha if isinstance(alpha, int) else max(1, round(alpha * self.steps(epoch)))

    @property
    def warmup(self) -> Warmup:
        """The warm-up given, or the paper's for mix (4 of 40 epochs), or none."""
        if self.section.warmup is not None:
            return self.section.warmup
        epochs = round(_MIX_WARMUP * self.epochs / _MIX_EPOCHS)
        return Warmup(epochs=epochs if self.section.candidates == "mix" else 0)

    def multipliers(self, epoch: int) -> tuple[float, ...]:
        """The set in force in `epoch` (from 1), with the guards of `include` added."""
        given = self.section.candidates
        base = given if isinstance(given, list) else LR_SETS[self._set_name(epoch)]
        return tuple(dict.fromkeys((*base, *self.section.include)))

    def _set_name(self, epoch: int) -> str:
        name = str(self.section.candidates)
        if name != "mix":
            return name
        if epoch <= round(_MIX_NARROW * self.epochs / _MIX_EPOCHS):
            return "narrow"
        if epoch <= round(_MIX_MIDDLE * self.epochs / _MIX_EPOCHS):
            return "middle"
        return "wide"

    def plan(self, epoch: int, history: Sequence[Round], losses: Sequence[float] = ()) -> Plan:
        """Warm-up epochs train at written-down rates; all others begin with a round.

        Raises DivergedError when every candidate of `max_halvings` + 1 rounds diverged.
        """
        if epoch <= self.warmup.epochs:
            return self._warmup_plan(epoch)
        if len(self.multipliers(epoch)) == 1:
            return self._only_plan(epoch)
        if is_decided(history, epoch):
            return self._main_plan(epoch, history[-1])
        self._refuse_when_hopeless(epoch, history)
        base_lr = history[-1].next_base_lr if history else self.section.initial
        candidates = tuple(
            Candidate(index, multiplier, base_lr * multiplier)
            for index, multiplier in enumerate(self.multipliers(epoch))
        )
        alpha = self.alpha_steps(epoch)
        reason = f"pre-train {len(candidates)} candidates for {alpha} iterations"
        return Plan(epoch, base_lr, reason, candidates, (1.0,) * alpha, kept_steps=alpha)

    def _only_plan(self, epoch: int) -> Plan:
        """m = 1 is no search: nothing to compare, and the multiplier still accumulates."""
        (multiplier,) = self.multipliers(epoch)
        lr = self.section.initial * multiplier ** (epoch - self.warmup.epochs)
        lrs = (lr,) * self.steps(epoch)
        return Plan(epoch, lr, "a single candidate: no search", lrs=lrs)

    def _main_plan(self, epoch: int, choice: Round) -> Plan:
        """The beta iterations that are left, all at the winner's rate."""
        lr, beta = choice.next_base_lr, self.steps(epoch) - self.alpha_steps(epoch)
        return Plan(epoch, lr, choice.reason, lrs=(lr,) * beta)

    def _warmup_plan(self, epoch: int) -> Plan:
        lrs = warmup_lrs(self.warmup, self.section.initial, self.steps.first)
        first = (epoch - 1) * self.steps.first
        return Plan(
            epoch,
            self.section.initial,
            f"warm-up epoch {epoch} of {self.warmup.epochs}",
            lrs=tuple(lrs[first : first + self.steps.first]),
        )

    def _refuse_when_hopeless(self, epoch: int, history: Sequence[Round]) -> None:
        failed = [r for r in history if r.epoch == epoch and r.winner is None]
        if len(failed) > self.section.max_halvings:
            tried = ", ".join(f"{r.base_lr:.4g}" for r in failed)
            raise DivergedError(
                f"epoch {epoch}: the loss of every candidate was not finite at each of these "
                f"base learning rates: {tried} (times the multipliers "
                f"{', '.join(map(str, self.multipliers(epoch)))}). Likely causes: data that are "
                "not finite, a loss that is not, or learning_rate.initial far too large; "
                "learning_rate.max_halvings allows more tries."
            )

    def choose(self, plan: Plan, results: Sequence[CandidateResult]) -> Round:
        """The highest score wins; ties go to the multiplier closest to 1.0.

        A candidate whose loss is not finite scores minus infinity. When all are, nobody
        wins and the next base rate is half of this one.
        """
        scores = tuple(self.score(result) for result in results)
        if not any(is_finite(score) for score in scores):
            reason = f"all {len(results)} candidates diverged: base rate halved"
            return Round(plan.epoch, plan.base_lr, scores, None, plan.base_lr / 2, reason)
        best = max(scores)
        tied = [r for r, score in zip(results, scores, strict=True) if score == best]
        winner = min(tied, key=lambda r: (abs(r.candidate.multiplier - 1), r.candidate.index))
        reason = f"best {self.section.score} of {len(results)}"
        if len(tied) > 1:
            reason += f"; {len(tied)} tied, multiplier closest to 1.0 taken"
        lr = winner.candidate.lr
        members = members_of_average(self.section, winner, results, scores)
        return Round(plan.epoch, plan.base_lr, scores, winner, lr, reason, averaged=members)

    def score(self, result: CandidateResult) -> float:
        """Higher is better: accuracy, or the loss with its sign turned."""
        if result.status != "ok":
            return float("-inf")
        if self.section.score == "val_accuracy":
            return result.val_accuracy
        return -result.val_loss
