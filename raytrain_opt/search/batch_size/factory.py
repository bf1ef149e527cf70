"""Build the batch-size strategy that a job's `batch_size_search` section names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raytrain_opt.config.batch_size import (
    BatchSizeSection,
    EpochTimeMinimizeSearch,
    GpuUsageMaximizeSearch,
    ThroughputKneeSearch,
)
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.search.batch_size.published import EpochTimeMinimize, GpuUsageMaximize
from raytrain_opt.search.batch_size.strategy import SizeBounds, Strategy
from raytrain_opt.search.batch_size.throughput_knee import ThroughputKnee

_STRATEGIES: dict[type, Callable[[Any, SizeBounds], Strategy]] = {
    ThroughputKneeSearch: ThroughputKnee,
    GpuUsageMaximizeSearch: GpuUsageMaximize,
    EpochTimeMinimizeSearch: EpochTimeMinimize,
}


def build_strategy(section: BatchSizeSection, bounds: SizeBounds) -> Strategy:
    """Build the strategy that the section names, with its settings."""
    return _STRATEGIES[type(section)](section, bounds)


def check_sampler(section: BatchSizeSection, *, use_gpu: bool) -> None:
    """Raise JobError for a GPU's utilization without GPU; a job must name the CPU's sampler."""
    if section.needs_utilization and not use_gpu and section.utilization.sampler == "auto":
        rule = (
            "must be cpu (the process's CPU time) if the job trains without a GPU, or choose "
            "another batch_size_search.strategy, such as throughput_knee"
        )
        raise JobError([Problem("batch_size_search.utilization.sampler", rule, "'auto'")])
