"""What a learning-rate policy is: results so far in, a decision with its reason out.

Policies are pure. `plan` says what an epoch does next: try candidates, or train the rest of it
at given rates. `choose` says which candidate won. The history that `plan` reads is the tuple of
what `choose` returned, and `losses` the mean training loss of each epoch so far, so a run can be
resumed from its records.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from raytrain_opt.train.totals import EvalTotals, TrainTotals


@dataclass(frozen=True)
class Candidate:
    """One learning rate in a round: `lr` is the base rate times `multiplier`. The optimiser's
    weight decay is multiplied by `decay`.
    """

    index: int
    multiplier: float
    lr: float
    decay: float = 1.0

    def lrs(self, plan: Plan) -> tuple[float, ...]:
        """The rate of each step of its pre-training."""
        return tuple(self.lr * share for share in plan.shape)


@dataclass(frozen=True)
class Plan:
    """What to do next in `epoch`.

    With candidates: pre-train each from the same state, at step i with `shape[i]` times its
    rate, and score it (with `paired`, block by block of the selection split, so that candidates
    can be compared on the same samples). The winner's state goes on as it was after `kept_steps`.
    `stage` names what is asked; `earlier` are the decisions of this epoch so far.
    All weight decays are multiplied by `decay_scale` in that pre-training.
    Without: train the rest of the epoch at `lrs`, a rate for each step, with `decay` times the
    optimiser's weight decay.
    """

    epoch: int
    base_lr: float
    reason: str
    candidates: tuple[Candidate, ...] = ()
    shape: tuple[float, ...] = ()
    kept_steps: int = 0
    paired: bool = False
    lrs: tuple[float, ...] = ()
    stage: str = ""
    earlier: tuple[Round, ...] = ()
    decay: float = 1.0
    decay_scale: float = 1.0

    @property
    def pretrain_steps(self) -> int:
        """Iterations of a candidate."""
        return len(self.shape)


@dataclass(frozen=True)
class CandidateResult:
    """What came of one candidate. `status` ok, diverged, or lost (its process died too often);
    times in seconds. `val_losses`: mean loss of each block of the selection split, where the plan
    is `paired`; `val_samples`: of that split.
    """

    candidate: Candidate
    status: str
    val_accuracy: float
    val_loss: float
    train_loss: float
    samples: int
    train_s: float
    score_s: float
    slot: int
    val_losses: tuple[float, ...] = ()
    val_samples: int = 0

    @classmethod
    def of(
        cls, candidate: Candidate, trained: Sequence[TrainTotals], scored: EvalTotals, slot: int
    ) -> CandidateResult:
        """From what its phases of training and its scoring came to."""
        samples = sum(phase.samples for phase in trained)
        train_loss = sum(phase.loss_sum for phase in trained) / max(samples, 1)
        return cls(
            candidate,
            "ok" if is_finite(train_loss, scored.loss) else "diverged",
            val_accuracy=scored.accuracy,
            val_loss=scored.loss,
            train_loss=train_loss,
            samples=samples,
            train_s=sum(phase.seconds for phase in trained),
            score_s=scored.seconds,
            slot=slot,
            val_losses=scored.block_losses,
            val_samples=scored.samples,
        )

    @classmethod
    def of_lost(cls, candidate: Candidate) -> CandidateResult:
        """Nothing came of it."""
        nan = math.nan
        return cls(candidate, "lost", nan, nan, nan, 0, 0.0, 0.0, slot=-1)

    @property
    def seconds(self) -> float:
        """Compute time of the candidate: its steps and its scoring."""
        return self.train_s + self.score_s


@dataclass(frozen=True)
class Round:
    """The decision over one set of candidates. `winner` is None when another round has to
    follow: all diverged, or nothing is decided yet. It may come from an earlier round of the
    epoch where no steps are kept. `tried`: what later rounds of the epoch compare with; `stage`
    and `steps` of each candidate are those of the plan. `averaged`: the candidates whose states'
    mean goes on, the winner first; empty: the winner's own. `next_decay`: factor of the weight
    decay from here on.
    """

    epoch: int
    base_lr: float
    scores: tuple[float, ...]
    winner: CandidateResult | None
    next_base_lr: float
    reason: str
    stage: str = ""
    steps: int = 0
    tried: tuple[CandidateResult, ...] = ()
    averaged: tuple[CandidateResult, ...] = ()
    next_decay: float = 1.0


class Policy(Protocol):
    """A learning-rate policy."""

    def plan(self, epoch: int, history: Sequence[Round], losses: Sequence[float] = ()) -> Plan:
        """What to do next in `epoch` (from 1), given all decisions and losses so far.

        Raises DivergedError when nothing is left to try.
        """
        ...

    def choose(self, plan: Plan, results: Sequence[CandidateResult]) -> Round:
        """Decide over the results of the plan's candidates."""
        ...


def is_decided(history: Sequence[Round], epoch: int) -> bool:
    """Whether the last round of this epoch has a winner."""
    return bool(history) and history[-1].epoch == epoch and history[-1].winner is not None


class NoCandidates:
    """For policies whose plans never have candidates."""

    def choose(self, plan: Plan, results: Sequence[CandidateResult]) -> Round:
        """There is nothing to choose: the driver never calls this."""
        raise ValueError(f"epoch {plan.epoch}: this policy has no candidates")


def is_finite(*values: float) -> bool:
    """True when none is infinite or not a number."""
    return all(math.isfinite(value) for value in values)
