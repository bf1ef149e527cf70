"""Progress of a run: what a resume starts from, and the measurements of the current epoch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from raytrain_opt.clock import Stopwatch, monotonic_s
from raytrain_opt.config.updates import OptimizerSection
from raytrain_opt.data.base import DataFingerprint
from raytrain_opt.errors import CheckpointError
from raytrain_opt.pools.commands import MainTrain
from raytrain_opt.pools.interface import TrainingOutcome
from raytrain_opt.pools.rounds import RoundProgress
from raytrain_opt.recording.records import EpochRecord, ScheduleRecord
from raytrain_opt.results import NO_STEPS, EvalTotals, Steps, TrainTotals
from raytrain_opt.search.policy import CandidateResult, History, TryCandidates
from raytrain_opt.train.checkpoint import Point


@dataclass
class Startup:
    """Seconds from the start of the process to each mark; monotonic."""

    began_s: float
    marks_s: dict[str, float] = field(default_factory=dict)

    def mark(self, name: str) -> None:
        """Record the time of a mark that is reached for the first time."""
        self.marks_s.setdefault(name, monotonic_s() - self.began_s)


@dataclass
class PartialEpoch:
    """The part of an epoch that is done: the first steps of its training."""

    steps: Steps = NO_STEPS  # on the way to the weights
    duration_s: float = 0.0
    timings_s: dict[str, float] = field(default_factory=dict)
    train: TrainTotals | None = None  # of the steps of the main training
    staleness: dict[int, int] | None = None
    round: RoundProgress | None = None  # in progress; it follows the complete ones


@dataclass(frozen=True)
class RunProgress:
    """What a resume starts from, besides the state."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # what another version wrote

    next_epoch: int = 1
    history: History = History()
    search_samples: int = 0  # the search cost: all but `kept_samples`
    kept_samples: int = 0  # trained on the way to the present weights
    partial_epoch: PartialEpoch = field(default_factory=PartialEpoch)
    data: DataFingerprint | None = None  # that were trained on
    job: dict[str, Any] | None = None  # every field of the job, by its path

    @property
    def samples(self) -> int:
        return self.search_samples + self.kept_samples

    @property
    def reached(self) -> Point:
        """How far the run has come; a checkpoint within the training tells no rounds."""
        partial, rounds = self.partial_epoch, self.history.rounds_of(self.next_epoch)
        point = Point(self.next_epoch - 1, len(rounds))
        if partial.train is not None and partial.steps.lrs:
            return replace(point, rounds=0, steps=len(partial.steps.lrs))
        if partial.round is None:
            return point
        steps = sum(totals.steps for totals in partial.round.totals.values())
        return replace(point, candidates=len(partial.round.results), candidate_steps=steps)

    def add_samples(self, *, search: int = 0, kept: int = 0) -> RunProgress:
        return replace(
            self,
            search_samples=self.search_samples + search,
            kept_samples=self.kept_samples + kept,
        )

    def to_json(self) -> dict[str, Any]:
        """Return numbers, texts, lists and dicts only."""
        plain: dict[str, Any] = _PROGRESS.dump_python(self)
        return plain

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RunProgress:
        """Parse the result of `to_json`. Raises CheckpointError if it is something else."""
        try:
            return _PROGRESS.validate_python(value)
        except ValidationError as error:
            raise CheckpointError(
                f"the checkpoint has no progress of this version: {error}"
            ) from error


_PROGRESS = TypeAdapter(RunProgress)


@dataclass
class EpochMetrics(PartialEpoch):
    """Measurements of the current epoch until it is recorded."""

    started_s: float = field(default_factory=monotonic_s)  # later, by the time of interruptions
    results: Sequence[CandidateResult] = ()  # of the round in progress
    is_ruined: bool = False  # by a loss or weights that are not finite: training starts again
    test: EvalTotals | None = None

    @property
    def stopwatch(self) -> Stopwatch:
        """Adds to the timings."""
        return Stopwatch(self.timings_s)

    @property
    def train_loss(self) -> float:
        """Mean training loss; NaN if a pre-training as long as the epoch left no step for it."""
        assert self.train is not None
        return self.train.loss if self.train.samples else math.nan

    def add(self, command: MainTrain, outcome: TrainingOutcome) -> None:
        """Add the steps of a main training, or of a part of it."""
        totals = outcome.totals
        self.train = totals if self.train is None else self.train.plus(totals)
        if outcome.staleness is not None:
            counts = Counter(self.staleness) + outcome.staleness
            self.staleness = dict(sorted(counts.items()))
        self.steps = self.steps.plus(command.steps.before(totals.steps))
        for name, seconds in outcome.timings_s.items():
            self.stopwatch.add(f"main_{name}", seconds)

    def begin_round(self, action: TryCandidates) -> RoundProgress:
        """Begin a round, or continue the one that an interrupted run has begun."""
        if self.round is None or self.round.action != action:
            self.round = RoundProgress(action)
        return self.round

    def partial(self) -> PartialEpoch:
        """Return what a run resumed now needs of this epoch."""
        values = {field.name: getattr(self, field.name) for field in fields(PartialEpoch)}
        values |= {"timings_s": dict(self.timings_s), "duration_s": monotonic_s() - self.started_s}
        return PartialEpoch(**values)

    def schedule(
        self, epoch: int, optimizer: OptimizerSection, *, restarts: bool
    ) -> ScheduleRecord:
        return ScheduleRecord(
            epoch=epoch,
            optimizer=str(optimizer.name),
            auto_weight_decay=optimizer.has_auto_weight_decay,
            restarts=restarts,
            lr_multipliers=dict(optimizer.group_lr_multipliers),
            steps=self.steps,
        )


def epoch_record(
    epoch: int,
    epochs: int,
    metrics: EpochMetrics,
    workers: int,
    optimizer: str,
    lrs: Sequence[float],
    end_s: float,
) -> EpochRecord:
    """Return a line of epochs.jsonl; `lrs`: of all steps so far; `end_s`: seconds of the run."""
    train, test = metrics.train, metrics.test
    assert train is not None
    return EpochRecord(
        epoch=epoch,
        epochs=epochs,
        lr=metrics.steps.lrs[-1],
        lr_peak=max(lrs),
        optimizer=optimizer,
        weight_decay_factor=metrics.steps.weight_decay_factor,
        train_loss=metrics.train_loss,
        test_metrics=dict(test.means) if test else {},
        metric=test.metric if test else None,
        test_samples=test.samples if test else 0,
        test_skipped=test.skipped if test else 0,
        workers=workers,
        samples=train.samples,
        samples_per_s=train.samples / train.duration_s if train.duration_s else 0.0,
        skipped=train.skipped,
        duration_s=monotonic_s() - metrics.started_s,
        end_s=end_s,
        timings_s=dict(metrics.timings_s),
        staleness=metrics.staleness,
    )
