"""What a learning-rate policy is: results so far in, a decision with its reason out.

Policies are pure. `plan` says what an epoch does next: either train all of it at given
rates, or first try candidates. `choose` says which candidate won. The history that `plan`
reads is the tuple of what `choose` returned, so a run can be resumed from its records.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Candidate:
    """One learning rate in a round: `lr` is the base rate times `multiplier`."""

    index: int
    multiplier: float
    lr: float


@dataclass(frozen=True)
class Plan:
    """What to do next in `epoch`.

    With candidates: pre-train each for `pretrain_steps` from the same state. Without:
    `lrs` holds the rate of every step of the epoch.
    """

    epoch: int
    base_lr: float
    reason: str
    candidates: tuple[Candidate, ...] = ()
    pretrain_steps: int = 0
    lrs: tuple[float, ...] = ()


@dataclass(frozen=True)
class CandidateResult:
    """What came of one candidate. `status` ok or diverged; times in seconds."""

    candidate: Candidate
    status: str
    val_accuracy: float
    val_loss: float
    train_loss: float
    samples: int
    train_s: float
    score_s: float
    slot: int

    @property
    def seconds(self) -> float:
        """Compute time of the candidate: its steps and its scoring."""
        return self.train_s + self.score_s


@dataclass(frozen=True)
class Round:
    """The decision over one set of candidates. `winner` is None when all diverged."""

    epoch: int
    base_lr: float
    scores: tuple[float, ...]
    winner: CandidateResult | None
    next_base_lr: float
    reason: str


class Policy(Protocol):
    """A learning-rate policy."""

    def plan(self, epoch: int, history: Sequence[Round]) -> Plan:
        """What to do next in `epoch` (from 1), given all decisions so far.

        Raises DivergedError when nothing is left to try.
        """
        ...

    def choose(self, plan: Plan, results: Sequence[CandidateResult]) -> Round:
        """Decide over the results of the plan's candidates."""
        ...


class NoCandidates:
    """For policies whose plans never have candidates."""

    def choose(self, plan: Plan, results: Sequence[CandidateResult]) -> Round:
        """There is nothing to choose: the driver never calls this."""
        raise ValueError(f"epoch {plan.epoch}: this policy has no candidates")


def is_finite(*values: float) -> bool:
    """True when none is infinite or not a number."""
    return all(math.isfinite(value) for value in values)
