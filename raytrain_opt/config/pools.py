"""The job file's sections on processes: how many, with what, and how long to wait for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from raytrain_opt.config.section import (
    BrokenRule,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
)


class WorkersSection(Section):
    """The data-parallel Ray Train workers."""

    count: PositiveInt = Field(1, description="How many; the global batch is split evenly.")
    min_count: PositiveInt | None = Field(
        None,
        description=(
            "Go on with as few as this many when others have died and cannot come back (their "
            "node is gone). The global batch stays: each computes more of it. Default: count."
        ),
    )
    use_gpu: bool | Literal["auto"] = Field(
        "auto", description="auto: on GPUs when the cluster has any, else on CPU."
    )
    resources: dict[str, PositiveFloat] | None = Field(
        None,
        description=(
            "Ray resources of each. Default: 0.6 GPU (so that a slot shares the device and no "
            "second worker does) or, on CPU, 0.6 of an even share of the CPUs, at most 1."
        ),
    )
    threads: Annotated[int, Field(gt=0, le=1024)] | None = Field(
        None, description="Compute threads on CPU. Default: the node's cores, shared evenly."
    )

    @property
    def least(self) -> int:
        """The fewest that the job may go on with."""
        return self.min_count or self.count

    def broken_rules(self) -> Iterator[BrokenRule]:
        """Rules over several fields."""
        if self.least > self.count:
            yield "min_count", f"is more than count, {self.count}"


class SlotsSection(Section):
    """The resident Ray Tune processes in which candidates are pre-trained."""

    count: PositiveInt | None = Field(
        None, description="How many. Default: one per candidate, as many as fit."
    )
    resources: dict[str, PositiveFloat] | None = Field(
        None, description="Ray resources of each. Default: 0.4 GPU or 0.4 of a CPU share."
    )


class LimitsSection(Section):
    """How long to wait for what, and how often to start again. No wait is without a limit."""

    start_s: Seconds = Field(600.0, description="For all workers and slots to be ready.")
    stall_s: Seconds = Field(
        900.0, description="For the next sign of progress of any worker, slot or probe at work."
    )
    stop_s: Seconds = Field(20.0, description="For the pools to end before they are killed.")
    max_restarts: NonNegativeInt = Field(
        3,
        description=(
            "Times the worker group, and each slot, is started again after a process died. A slot "
            "that dies once more is given up, and the others do its work; a worker group ends the "
            "run."
        ),
    )
