"""Spans and events: as processes exchange them, on any clock, and as a run records them."""

from __future__ import annotations

from pydantic import Field

from raytrain_opt.recording.base import Number, Record, RecordPart, Timings


class Span(RecordPart):
    """The time in which one process executed one command."""

    process: str = Field(description="`worker 0`, `slot 1`, ..., or `driver`.")
    command: str = Field(description="What it did: `pretrain`, `main_train`, `evaluate`, ...")
    start_s: float = Field(description="Start, in seconds of the run.")
    duration_s: float = Field(description="Duration.")
    timings_s: Timings = Field(
        default_factory=dict, description="Seconds by part, as the process measured them."
    )


class Event(RecordPart):
    """What happened in a run: something that it survived, decided, or that ended it."""

    kind: str = Field(
        description=(
            "`restarted` (a process), `lost` (a slot, for good), `fewer` or `more` (workers), "
            "`storage` (refused copies, then took one), `callback` (one failed), `optimizer` (one "
            "is left out of the search), `overfitting` (more weight decay), `collapsed` ("
            "training starts again at a lower rate), `diverged` (what such a training raised), "
            "`planned` (the length "
            "of a training for a time), `patience` (lost, training continues), `stopped` (by the "
            "`stop` section), `resumed`, `interrupted`, `failed`."
        )
    )
    text: str = Field(description="What happened, as text.")
    time_s: float = Field(description="When, in seconds of the run.")
    process: str | None = Field(None, description="The process; null when it is the run.")
    silent_s: Number = Field(
        None, description="Time from its last sign of life to its restart; null when not known."
    )


class SpanRecord(Span, Record):
    """One line of timeline.jsonl: a command that a worker or slot executed, or a checkpoint.

    Of a pool with more than 16 processes: the first 16 and, of each command, who took longest of
    the others.
    """

    epoch: int = Field(description="Epoch, from 1.")

    @property
    def pool(self) -> str:
        """`worker` of `worker 0`."""
        return self.process.split()[0]


class EventRecord(Event, Record):
    """One line of events.jsonl: a failure, a recovery, a resume, a plan, or an early end."""

    utc: str = Field(description="Date, ISO 8601 in UTC.")
    epoch: int = Field(description="Epoch, from 1.")
