"""How far a run is: what it goes on from, and what is measured of the epoch in hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from raytrain_opt.clock import Parts, monotonic_s
from raytrain_opt.errors import CheckpointError
from raytrain_opt.search.policy import CandidateResult, Plan, Round
from raytrain_opt.train.totals import EvalTotals, TrainTotals


@dataclass(frozen=True)
class Begun:
    """What the rounds of an epoch did before its main training: the rates of the steps that are
    kept, the record that is complete after the main training only, and seconds, also by part.
    """

    lrs: tuple[float, ...] = ()
    round_record: dict[str, Any] | None = None
    seconds: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Position:
    """From where a run goes on: the epoch that is next and what is done of it, the decisions so
    far, the rate of each step and the training loss of each whole epoch.
    """

    next_epoch: int = 1
    history: tuple[Round, ...] = ()
    lrs: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    search_samples: int = 0
    main_samples: int = 0
    begun: Begun = Begun()

    @property
    def rounds_written(self) -> int:
        """Lines of rounds.jsonl: one for each decision, but for a record that is not complete."""
        return len(self.history) - (self.begun.round_record is not None)

    def to_plain(self) -> dict[str, Any]:
        """Numbers, texts, lists and dicts only."""
        plain: dict[str, Any] = _POSITION.dump_python(self)
        return plain

    @classmethod
    def from_plain(cls, value: dict[str, Any]) -> Position:
        """The inverse of `to_plain`. Raises CheckpointError when it is none of ours."""
        try:
            return _POSITION.validate_python(value)
        except ValidationError as error:
            raise CheckpointError(f"the commit's position is none of a run: {error}") from error


_POSITION = TypeAdapter(Position)


@dataclass
class EpochInHand:
    """What is measured of the present epoch until it is written down."""

    started_s: float
    parts: Parts = field(default_factory=Parts)
    round_record: dict[str, Any] | None = None
    lrs: list[float] = field(default_factory=list)
    train: TrainTotals | None = None
    test: EvalTotals | None = None
    staleness: dict[str, object] | None = None

    @classmethod
    def after(cls, begun: Begun) -> EpochInHand:
        """It goes on now, and has taken as long as it had when it was cut."""
        this = cls(monotonic_s() - begun.seconds, Parts(), begun.round_record, list(begun.lrs))
        this.parts.seconds.update(begun.parts_s)
        return this

    def begun(self) -> Begun:
        """What is kept of it when it is cut here."""
        seconds = monotonic_s() - self.started_s
        return Begun(tuple(self.lrs), self.round_record, seconds, dict(self.parts.seconds))


def round_record(
    plan: Plan, results: Sequence[CandidateResult], choice: Round, sha256: str | None
) -> dict[str, Any]:
    """A line of rounds.jsonl, but for what only the workers know."""
    candidates = [
        {
            **asdict(result.candidate),
            "score": score,
            "val_accuracy": result.val_accuracy,
            "val_loss": result.val_loss,
            "train_loss": result.train_loss,
            "seconds": result.seconds,
            "slot": result.slot,
            "status": result.status,
        }
        for result, score in zip(results, choice.scores, strict=True)
    ]
    return {
        "epoch": plan.epoch,
        "stage": plan.stage,
        "base_lr": plan.base_lr,
        "pretrain_steps": plan.pretrain_steps,
        "kept_steps": plan.kept_steps,
        "candidates": candidates,
        "selection_samples": max((result.val_samples for result in results), default=0),
        "winner": None if choice.winner is None else choice.winner.candidate.index,
        "averaged": [member.candidate.index for member in choice.averaged],
        "reason": choice.reason,
        "next_base_lr": choice.next_base_lr,
        "winner_sha256": sha256,
    }
