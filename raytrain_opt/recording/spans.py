"""Spans and events as processes exchange them: records without an epoch, on any clock."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Span(BaseModel):
    """The time in which one process executed one command."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    process: str = Field(description="`worker 0`, `slot 1`, ..., or `driver`.")
    command: str = Field(description="What it did: `pretrain`, `main_train`, `evaluate`, ...")
    start_s: float = Field(description="Start, in seconds of the run.")
    duration_s: float = Field(description="Duration.")
    timings_s: dict[str, float | None] = Field(
        default_factory=dict, description="Seconds by part, as the process measured them."
    )
    utilization_pct: float | None = Field(
        None,
        description=(
            "Utilization of the process's compute threads during the command, or of its GPU at "
            "the end of the command; null when not known."
        ),
    )
    memory_mib: float | None = Field(
        None,
        description=(
            "Peak memory of tensors on the GPU so far, or resident memory of the process; null "
            "when not known."
        ),
    )


class Event(BaseModel):
    """What happened in a run: something that it survived, decided, or that ended it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str = Field(
        description=(
            "`restarted` (a process), `lost` (a slot, for good), `fewer` or `more` (workers), "
            "`continued` (after a worker died, within an epoch), "
            "`imbalance` (micro-batches too coarse for the workers' speeds), "
            "`storage` (refused copies, then took one), `callback` (one failed), `optimizer` (one "
            "is left out of the search), `overfitting` (more weight decay), `collapsed` ("
            "training starts again at a lower rate), `planned` (the length "
            "of a training for a time), `patience` (lost, training continues), `stopped` (by the "
            "`stop` section), `resumed`, `interrupted`, `failed`."
        )
    )
    text: str = Field(description="What happened, as text.")
    time_s: float = Field(description="When, in seconds of the run.")
    process: str | None = Field(None, description="The process; null when it is the run.")
    silent_s: float | None = Field(
        None, description="Time from its last sign of life to its restart; null when not known."
    )
