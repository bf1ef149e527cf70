"""Protocol and values of learning-rate policies: results in, a decision with its reason out.

Policies are pure: all that they may depend on is in `History`, so a run can be resumed from a
checkpoint of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

from raytrain_opt.errors import DivergedError
from raytrain_opt.optim.epoch_steps import EpochSpan
from raytrain_opt.results import EvalTotals, Metric, Steps, TrainTotals

# How the reason of a round begins after which the usual rate trains, not what candidates say.
NOT_DECIDED = "not decided: "


@dataclass(frozen=True)
class Candidate:
    """One learning rate in a round: `lr` is the base rate times `multiplier`."""

    index: int
    multiplier: float
    lr: float
    weight_decay_factor: float = 1.0  # of the optimizer's weight decay
    optimizer: int = 0  # its position among those of the job

    def steps(self, action: TryCandidates) -> Steps:
        """Return the steps of its pre-training."""
        lrs = tuple(self.lr * factor for factor in action.lr_shape)
        return Steps(0, lrs, self.weight_decay_factor, self.optimizer)


@dataclass(frozen=True)
class TryCandidates:
    """A round: pre-train each candidate from the same state, and score them."""

    epoch: int
    base_lr: float
    candidates: tuple[Candidate, ...]
    lr_shape: tuple[float, ...]  # step i of a candidate has lr_shape[i] times its rate
    score: Literal["val_metric", "val_loss"] = "val_loss"
    keeps_winner: bool = False  # the run continues from the winner's state
    stage: str = ""  # which question of the policy the round answers
    fresh_statistics: bool = False  # of BatchNorm, taken anew before the score

    @property
    def pretrain_steps(self) -> int:
        """Optimizer updates of each candidate."""
        return len(self.lr_shape)

    @property
    def kept_steps(self) -> int:
        """Updates of the winner that the training keeps."""
        return self.pretrain_steps if self.keeps_winner else 0

    def score_of(self, result: CandidateResult) -> float:
        """Return the score, higher is better: of the task's metric, or the negative loss."""
        if result.status != "ok":
            return float("-inf")
        if self.score == "val_loss":
            return -result.val_loss
        return result.metric.score(result.val_metric)

    def best(self, results: Sequence[CandidateResult]) -> CandidateResult:
        """Return the best result; on a tie, the one with the multiplier closest to 1.0."""

        def key(result: CandidateResult) -> tuple[float, float, int]:
            candidate = result.candidate
            return self.score_of(result), -abs(candidate.multiplier - 1), -candidate.index

        return max(results, key=key)


@dataclass(frozen=True)
class StartAgain:
    """Begin the epoch, and all that follow, from the initial weights."""

    epoch: int
    reason: str


@dataclass(frozen=True)
class TrainEpoch:
    """Train the rest of the epoch, which are these steps."""

    epoch: int
    steps: Steps
    reason: str = ""  # said where no round before it has said how
    scores: bool = False  # the validation split, after the epoch
    overfitting: str = ""  # finding that the run reports before the epoch


@dataclass(frozen=True)
class CandidateResult:
    """Scores and costs of one candidate."""

    candidate: Candidate
    status: str  # ok, diverged, or lost (its slot died too often)
    val_metric: float  # mean of the `metric` that decides, on the validation split
    val_loss: float
    train_loss: float
    samples: int
    duration_s: float  # compute time of its steps and its scoring
    slot: int  # -1 when it was lost, or all workers trained it together
    metric: Metric = Metric()
    failure: str = ""  # the exception that its training or scoring raised
    val_loss_error: float = 0.0  # its standard error, over samples or batch means

    @classmethod
    def of(
        cls, candidate: Candidate, trained: TrainTotals, scored: EvalTotals, slot: int
    ) -> CandidateResult:
        """Build the result from the candidate's training and its evaluation."""
        value = scored.means[scored.metric.name]
        return cls(
            candidate,
            "ok" if is_finite(trained.loss, scored.loss, value) else "diverged",
            val_metric=value,
            val_loss=scored.loss,
            train_loss=trained.loss,
            samples=trained.samples,
            duration_s=trained.duration_s + scored.duration_s,
            slot=slot,
            metric=scored.metric,
            val_loss_error=scored.loss_error,
            failure=trained.failure or scored.failure,
        )

    @classmethod
    def lost(cls, candidate: Candidate) -> CandidateResult:
        """Return the result of a candidate whose slot died too often."""
        return cls(candidate, "lost", math.nan, math.nan, math.nan, 0, 0.0, slot=-1)


@dataclass(frozen=True)
class Decision:
    """The outcome of one round."""

    epoch: int
    base_lr: float
    winner: CandidateResult | None  # perhaps of an earlier round; None: another has to follow
    next_base_lr: float
    reason: str
    tried: tuple[CandidateResult, ...] = ()  # results that later rounds of the epoch compare with
    next_optimizer: int = 0
    untrained_loss: float | None = None  # of that optimizer's candidate that hardly trained


class EpochLosses(NamedTuple):
    """What an epoch tells the policy."""

    training: float  # mean loss, or the negative score that a plateau follows
    validation: float | None = None  # after the epoch, where it scores


@dataclass(frozen=True)
class History:
    """Everything a policy may depend on."""

    decisions: tuple[Decision, ...] = ()
    epoch_losses: tuple[float, ...] = ()  # the `training` loss of each finished epoch
    validation_losses: tuple[tuple[int, float], ...] = ()  # epochs that score, and their losses
    restarts: tuple[int, ...] = ()  # epochs that began from the initial weights
    spans: tuple[EpochSpan, ...] = ()  # of `train_for`, before each epoch and after each round

    def after_round(self, decision: Decision) -> History:
        """Return the history with one more decision."""
        return replace(self, decisions=(*self.decisions, decision))

    def after_epoch(self, losses: EpochLosses) -> History:
        """Return the history with the losses of one more epoch."""
        epoch = len(self.epoch_losses) + 1
        scored = () if losses.validation is None else ((epoch, losses.validation),)
        return replace(
            self,
            epoch_losses=(*self.epoch_losses, losses.training),
            validation_losses=(*self.validation_losses, *scored),
        )

    def after_restart(self, action: StartAgain) -> History:
        """Return the history in which this epoch begins from the initial weights."""
        return replace(self, restarts=(*self.restarts, action.epoch))

    def after_span(self, span: EpochSpan) -> History:
        """Return the history with one more estimate of what the next epoch covers."""
        return replace(self, spans=(*self.spans, span))

    @property
    def latest(self) -> Decision | None:
        """The last decision; None before the first."""
        return self.decisions[-1] if self.decisions else None

    def rounds_of(self, epoch: int) -> tuple[Decision, ...]:
        """Return the decisions of one epoch."""
        return tuple(decision for decision in self.decisions if decision.epoch == epoch)

    def is_decided(self, epoch: int) -> bool:
        """Return whether the last round of this epoch has a winner."""
        last = self.latest
        return last is not None and last.epoch == epoch and last.winner is not None


class Policy(Protocol):
    """A learning-rate policy."""

    @property
    def search_updates(self) -> float:
        """The updates of all candidates, at most; 0 where there are none or it is unknown."""
        return 0

    @property
    def last_restart(self) -> int:
        """The last epoch in which it may start again; 0 if it never does."""
        return 0

    def next(self, epoch: int, history: History) -> TryCandidates | StartAgain | TrainEpoch:
        """Return what to do next in `epoch` (from 1). Raises DivergedError without any rate."""

    def decide(
        self, action: TryCandidates, results: Sequence[CandidateResult], history: History
    ) -> Decision:
        """Decide the round from the results of its candidates; a policy may have none."""
        raise ValueError(f"epoch {action.epoch}: this policy has no candidates")


def all_diverged(
    epoch: int, rates: Iterable[float], tried: Iterable[CandidateResult]
) -> DivergedError:
    """Return the error of an epoch none of whose candidates had a finite loss."""
    tried = tuple(tried)
    failures = [result.failure for result in tried if result.failure]
    finite = [r for r in tried if r.status != "lost" and is_finite(r.train_loss, r.val_loss)]
    what = f"metric {finite[-1].metric.name}" if finite else "loss"
    failure = f" The last exception: {failures[-1]}" if failures else ""
    return DivergedError(
        f"epoch {epoch}: the {what} of every candidate was not finite, at each of these learning "
        f"rates: {', '.join(f'{lr:.3g}' for lr in rates)}. Likely causes: data or a {what} that "
        f"is not finite, or a learning_rate.initial far too large.{failure}"
    )


def is_finite(*values: float) -> bool:
    """Return whether no value is infinite or NaN."""
    return all(math.isfinite(value) for value in values)
