"""The record files of a run: one model for each record, used to write it and to read it.

A record is one JSON object: a line of a `.jsonl` file, or a `.json` file. Numbers that are not
finite are written as null. `make docs` generates the documentation from these models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from raytrain_opt.results import Metric, Predictions
from raytrain_opt.search.fixed_schedule import RecordedEpoch
from raytrain_opt.search.policy import NOT_DECIDED

if TYPE_CHECKING:
    from raytrain_opt.search.policy import CandidateResult, Decision, TryCandidates

SCHEMA_VERSION = 1

# JSON has no infinity and no NaN: a float that is not finite is read back as None.
Number = float | None
Timings = dict[str, Number]


class RecordPart(BaseModel):
    """Base of every object in a record."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def from_values(cls, values: Mapping[str, object]) -> Self:
        """Return the object with those of the values that are its fields."""
        fields = cls.model_fields
        return cls.model_validate({name: v for name, v in values.items() if name in fields})


class Record(RecordPart):
    """Base of every record."""

    file: ClassVar[str]  # its name in the run directory
    counted_by: ClassVar[str] = ""  # the field that is 1 in the first line of its file, 2, ...
    schema_version: int = Field(
        SCHEMA_VERSION, le=SCHEMA_VERSION, description="Version of the record format."
    )


class CandidateRecord(RecordPart):
    """One candidate of a round."""

    index: int = Field(description="Position in the round's set of candidates, from 0.")
    multiplier: float = Field(description="Factor on the round's base learning rate.")
    lr: float = Field(description="Learning rate.")
    optimizer: str = Field(description="Name of the optimizer.")
    weight_decay_factor: float = Field(description="Factor on the optimizer's weight decay.")
    score: Number = Field(description="Score that the policy compares; higher is better.")
    val_metric: Number = Field(description="`metric` on the validation split.")
    val_loss: Number = Field(description="Mean loss on the validation split.")
    val_loss_error: Number = Field(0.0, description="Its standard error over samples or batches.")
    train_loss: Number = Field(description="Mean training loss over the pre-training.")
    duration_s: Number = Field(description="Compute time of pre-training and scoring.")
    slot: int = Field(description="Slot that trained it; -1: all workers did, or it was lost.")
    status: Literal["ok", "diverged", "lost"] = Field(
        description="ok; diverged (a loss is not finite); lost (its slot died too often)."
    )
    failure: str = Field(
        "", description="Exception of its training or scoring, which counts as diverged; or empty."
    )

    @classmethod
    def from_result(
        cls, result: CandidateResult, action: TryCandidates, optimizers: Sequence[str]
    ) -> CandidateRecord:
        """Return the record of one candidate's result."""
        candidate, score = result.candidate, action.score_of(result)
        values = {"optimizer": optimizers[candidate.optimizer], "score": score}
        return cls.from_values(vars(candidate) | vars(result) | values)


class RoundRecord(Record):
    """One line of rounds.jsonl: one set of candidates and the decision over it."""

    file = "rounds.jsonl"
    epoch: int = Field(description="Epoch of the round, from 1.")
    stage: str = Field(description="Part of the search; empty for rounds of policy stpt.")
    base_lr: float = Field(description="Learning rate that multipliers refer to.")
    pretrain_steps: int = Field(description="Optimizer updates of each candidate.")
    kept_steps: int = Field(description="Updates of the winner that the training keeps.")
    search_on: Literal["slots", "workers"] = Field(description="Who trained the candidates.")
    candidates: tuple[CandidateRecord, ...] = Field(description="All candidates, losers included.")
    metric: Metric = Field(
        Metric(), description="The metric of the task that decides, and whether more is better."
    )
    winner: int | None = Field(description="`index` of the winner; null: another round follows.")
    reason: str = Field(description="Why the policy decided so.")
    next_base_lr: float = Field(description="Base learning rate after the round.")
    timings_s: Timings = Field(
        default_factory=dict, description="Seconds of the round, and of the epoch so far, by part."
    )

    @property
    def is_undecided(self) -> bool:
        """Whether the usual rate trains after the round, because no candidate learned enough."""
        return self.reason.startswith(NOT_DECIDED)

    @cached_property
    def chosen(self) -> CandidateRecord | None:
        """The winner, or None when it is no candidate of this round."""
        return next((c for c in self.candidates if c.index == self.winner), None)

    @classmethod
    def from_decision(
        cls,
        action: TryCandidates,
        results: Sequence[CandidateResult],
        decision: Decision,
        optimizers: Sequence[str],
        search_on: Literal["slots", "workers"],
        timings_s: Mapping[str, float],
    ) -> RoundRecord:
        """Return the record of a round. `optimizers`: names of the job's."""
        return cls(
            epoch=action.epoch,
            stage=action.stage,
            base_lr=action.base_lr,
            pretrain_steps=action.pretrain_steps,
            kept_steps=action.kept_steps,
            search_on=search_on,
            candidates=tuple(CandidateRecord.from_result(r, action, optimizers) for r in results),
            metric=next((r.metric for r in results if r.status != "lost"), Metric()),
            winner=None if decision.winner is None else decision.winner.candidate.index,
            reason=decision.reason,
            next_base_lr=decision.next_base_lr,
            timings_s=dict(timings_s),
        )


class EpochResult(RecordPart):
    """The measured values of one epoch; without an evaluation there are no metrics."""

    test_metrics: dict[str, Number] = Field(
        default_factory=dict,
        description=(
            "All metrics of the task on the test split. Of classification: loss, accuracy "
            "and top5 (the label is among the five most probable classes), fractions 0..1."
        ),
    )
    metric: Metric | None = Field(
        None, description="The metric that decides, and whether more is better."
    )
    epoch: int = Field(description="Epoch, from 1.")
    train_loss: Number = Field(description="Mean training loss of the main training.")
    lr: float = Field(description="Learning rate of the last step.")
    lr_peak: float = Field(description="Highest learning rate of all steps so far.")
    optimizer: str = Field(description="Name of the optimizer.")

    @property
    def test_metric(self) -> float | None:
        """The metric that decides; None when not evaluated."""
        return self.test_metrics.get(self.metric.name) if self.metric else None

    @property
    def score(self) -> float | None:
        """The metric that decides, higher is better; None when not evaluated or not finite."""
        value = self.test_metric
        if self.metric is None or value is None or not isfinite(value):
            return None
        return self.metric.score(value)


class EpochRecord(EpochResult, Record):
    """One line of epochs.jsonl."""

    file, counted_by = "epochs.jsonl", "epoch"
    epochs: int = Field(
        gt=0,
        description="Length of the training in epochs, with `train_for` as estimated before it.",
    )
    weight_decay_factor: float = Field(description="Factor on the optimizer's weight decay.")
    test_samples: int = Field(description="Test samples.")
    test_skipped: int = Field(0, description="Others left out because they could not be read.")
    workers: int = Field(description="Workers that trained the epoch.")
    samples: int = Field(description="Samples of the main training.")
    samples_per_s: float = Field(description="Speed of the main training.")
    skipped: int = Field(description="Training samples left out because they could not be read.")
    duration_s: float = Field(description="Wall time, with rounds and evaluation.")
    end_s: float = Field(description="End, in seconds of the run without its interruptions.")
    timings_s: Timings = Field(description="Seconds by part, as the driver measured them.")
    staleness: dict[int, int] | None = Field(
        None,
        description=(
            "Number of micro-batch gradients by their staleness, the number of updates between "
            "the weights that one was computed on and those that it changes; null with "
            "`parallel.mode: sync`."
        ),
    )


def best_epoch(epochs: Sequence[EpochRecord]) -> EpochRecord | None:
    """Return the first epoch with the best test metric; None when none was evaluated."""
    scores = [(epoch.score, -epoch.epoch, epoch) for epoch in epochs if epoch.score is not None]
    return max(scores)[2] if scores else None


class BatchSizeProbeRecord(Record):
    """One line of batch_size.jsonl: one probe of the batch-size search."""

    file, counted_by = "batch_size.jsonl", "probe"
    probe: int = Field(description="Number of the probe, from 1.")
    check: bool = Field(description="Whether the probe checks the chosen size.")
    reason: str = Field(description="Why the strategy probed this size.")
    batch_size: int = Field(description="Samples per worker.")
    status: Literal["ok", "out_of_memory"] = Field(description="ok or out_of_memory.")
    samples_per_s: Number = Field(description="Speed of one worker.")
    samples_per_s_error: Number = Field(description="Standard error of `samples_per_s`.")
    steps: int = Field(description="Timed training steps.")
    duration_s: Number = Field(description="Time of these steps.")
    timings_s: Timings = Field(description="Mean seconds of a step by part.")
    utilization_pct: Number = Field(
        description="Utilization of the device: mean of the larger half of the samples."
    )
    utilization_mean_pct: Number = Field(description="Utilization: mean of all samples.")
    peak_memory_mib: Number = Field(description="Peak memory of the slot that probes.")
    error: str = Field(description="Message of the out-of-memory error; otherwise empty.")
    pid: int | None = Field(None, description="Process that measured; null when it died.")


class BatchSizeRecord(Record):
    """batch_size.json: the chosen batch size."""

    file = "batch_size.json"
    batch_size_per_worker: int = Field(description="Chosen samples per worker.")
    global_batch_size: int = Field(description="Chosen samples of one update.")
    samples_per_s: float = Field(description="Speed of one worker, from the check.")
    reason: str = Field(description="Why the strategy chose this size.")
    duration_s: float = Field(description="Wall time of the search.")
    probes: int = Field(description="Number of probes.")


class ScheduleRecord(RecordedEpoch, Record):
    """A line of schedule.jsonl: the steps of an epoch, which policy `replay` repeats."""

    file, counted_by = "schedule.jsonl", "epoch"


class SearchResult(RecordPart):
    """Cost of the learning-rate search."""

    samples: int = Field(description="Samples trained beyond those in the final weights.")
    main_samples: int = Field(description="Samples trained on the way to the final weights.")
    fraction_of_training: float = Field(description="`samples` / `main_samples`.")
    rounds: int = Field(description="Number of rounds.")


class Hardware(RecordPart):
    """The machines of a run."""

    nodes: tuple[dict[str, float], ...] = Field(description="Resources of each node of Ray.")
    workers: int = Field(description="Number of workers.")
    slots: int = Field(description="Number of slots.")
    workers_use_gpu: bool = Field(description="Whether workers train on GPUs.")


class ResultRecord(Record):
    """result.json: written when a run has finished."""

    file = "result.json"
    finished_utc: str = Field(description="Date of the end, ISO 8601 in UTC.")
    status: Literal["finished"] = Field("finished", description="finished.")
    job: str = Field(description="Name of the job.")
    run_dir: str = Field(description="The run directory.")
    epochs: int = Field(description="Number of epochs.")
    steps_per_epoch: int = Field(description="Steps of the first epoch.")
    final: EpochResult = Field(description="The last epoch.")
    best: EpochResult | None = Field(description="The epoch with the best `metric`, or null.")
    final_set: dict[str, float] = Field({}, description="The best epoch's metrics on a third set.")
    search: SearchResult = Field(description="Samples of the search and of the training.")
    wall_s: float = Field(description="Wall time, without the pauses before a resume.")
    time_to_first_step_s: Number = Field(description="Time until the first training step.")
    startup_s: Timings = Field(description="Time from the start to each mark of the start-up.")
    restarts: dict[str, int] = Field(description="Restarts by pool, of the last execution.")
    versions: dict[str, str] = Field(description="Versions of Python and of packages.")
    hardware: Hardware = Field(description="The machines.")


class PredictionsRecord(Predictions, Record):
    """predictions.json: predictions on the test split after the last evaluated epoch.

    Of classification only. A prediction is the most probable class, and its confidence the
    probability of that class.
    """

    file = "predictions.json"
    epoch: int = Field(description="Epoch, from 1.")
    class_names: tuple[str, ...] = Field(description="Names of the classes, or their numbers.")


class Phase(Record):
    """One line of timeline.jsonl: a phase of an epoch, as the driver saw it."""

    file = "timeline.jsonl"
    epoch: int = Field(description="Epoch, from 1.")
    phase: str = Field(
        description=(
            "`pretrain` (candidates), `take_state` (of the winner), `main_train`, `evaluate`, or "
            "`checkpoint_wait` (for the one before)."
        )
    )
    start_s: float = Field(description="Start, in seconds of the run.")
    duration_s: float = Field(description="Duration.")


class Event(Record):
    """One line of events.jsonl: a failure, a recovery, a resume, a length, or an early end."""

    file = "events.jsonl"
    kind: str = Field(
        description=(
            "`restarted` (a process), `lost` (a slot, for good), `fewer` or `more` (workers), "
            "`storage` (refused copies, then took one), `callback` (one failed), `optimizer` (one "
            "is left out of the search), `overfitting` (more weight decay), `collapsed` (training "
            "starts again at a lower rate), `diverged` (what such a training raised), `length` "
            "(with `train_for`, or changed by a resume), `patience` (lost, training continues), "
            "`unreadable` (test samples), `stopped` (by the `stop` section), `resumed`, "
            "`interrupted`, `failed`."
        )
    )
    text: str = Field(description="What happened, as text.")
    time_s: float = Field(description="When, in seconds of the run.")
    process: str | None = Field(None, description="The process; null when it is the run.")
    silent_s: Number = Field(None, description="Time from its last sign of life to its restart.")
    utc: str = Field("", description="Date, ISO 8601 in UTC.")
    epoch: int = Field(0, description="Epoch, from 1.")
