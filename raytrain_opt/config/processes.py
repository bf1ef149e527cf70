"""Sections of the job file about processes: their number, resources and time limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from raytrain_opt.config.section import BrokenRule, PositiveFloat, PositiveInt, Seconds, Section


def _refuse_parts(resources: dict[str, float]) -> dict[str, float]:
    if (gpus := resources.get("GPU", 0)) > 1 and gpus != int(gpus):
        raise ValueError("GPU must be an integer above 1")
    return resources


Resources = Annotated[dict[str, PositiveFloat], AfterValidator(_refuse_parts)]


class CountRange(Section):
    """As many workers as the cluster has room for: it may lose nodes and get others."""

    min: PositiveInt
    """Wait for nodes when there is room for fewer."""
    max: PositiveInt
    """Number of workers where the cluster has room."""


class WorkersSection(Section):
    """The data-parallel workers of Ray Train."""

    count: PositiveInt | Literal["auto"] | CountRange = "auto"
    """Number of workers; each computes an equal part of the global batch. auto: as many as there
    are free GPUs, or the largest number below that divides global_batch_size; without GPUs, 1.
    {min: 2, max: 8}: continue with fewer when a node is lost, and with more, from the next epoch
    on, when there is room again; the global batch stays."""
    use_gpu: bool | Literal["auto"] = "auto"
    """auto: use GPUs if the cluster has any, else the CPU."""
    resources: Resources | None = None
    """Ray resources of each worker. Default: a GPU; where there are slots, 0.6 of it, so that a
    slot fits on the same device and a second worker does not; on CPU, 0.6 of the CPUs per worker,
    at most 0.6."""
    threads: Annotated[PositiveInt, Field(le=1024)] | None = None
    """Compute threads of a worker on CPU; slots share as many. Default: the cores of the node that
    other programs leave idle at the start / count, or fewer, if training steps that are timed at
    the start are as fast with fewer; on a Ray that runs already, its cores / count; on one
    machine, OMP_NUM_THREADS if it is set. A resume keeps the number."""

    @property
    def size(self) -> int:
        """The largest number of workers; of `auto`, 1 until the cluster is known."""
        if isinstance(self.count, CountRange):
            return self.count.max
        return 1 if self.count == "auto" else self.count

    @property
    def min_workers(self) -> int:
        """The smallest number of workers that the job may continue with."""
        return self.count.min if isinstance(self.count, CountRange) else self.size

    @property
    def can_shrink(self) -> bool:
        """Whether the job may continue with fewer workers."""
        return self.min_workers < self.size

    @property
    def is_given(self) -> bool:
        """Whether the job says how many workers there are, at most."""
        return self.count != "auto"

    def broken_rules(self) -> Iterator[BrokenRule]:
        """Refuse a minimum above the maximum."""
        if self.min_workers > self.size:
            yield "count.min", f"is more than max, {self.size}"


class SlotsSection(Section):
    """The resident Ray Tune trials that train candidates."""

    count: PositiveInt | None = None
    """Number of slots. Default: one per candidate, if the cluster has room."""
    resources: Resources | None = None
    """Ray resources of each slot. Default: as for workers, with 0.4 for 0.6."""


class TimeoutsSection(Section):
    """How long to wait for processes. Every wait has a limit."""

    start_s: Seconds = 600.0
    """Until all workers and slots are ready."""
    no_progress_s: Seconds = 900.0
    """Without any progress of a worker, slot or probe that has a command, of the data that are
    read at the start, or of a checkpoint that is written."""
    stop_s: Seconds = 20.0
    """After Ctrl-C or SIGTERM: until the step that was reached is done. Then, and after a
    training: until the pools have ended, before they are killed."""
