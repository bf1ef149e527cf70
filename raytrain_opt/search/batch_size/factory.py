"""Build the batch-size strategy that a job's `batch_size_search` section names."""

from __future__ import annotations

from raytrain_opt.config.batch_size import (
    BatchSizeSection,
    EpochTimeMinimizeSearch,
    GpuUsageMaximizeSearch,
)
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.search.batch_size.published import EpochTimeMinimize, GpuUsageMaximize
from raytrain_opt.search.batch_size.strategy import SizeBounds, Strategy
from raytrain_opt.search.batch_size.throughput_knee import ThroughputKnee


def build_strategy(section: BatchSizeSection, bounds: SizeBounds) -> Strategy:
    """Build the strategy that the section names, with its settings."""
    if isinstance(section, GpuUsageMaximizeSearch):
        return GpuUsageMaximize(section, bounds)
    if isinstance(section, EpochTimeMinimizeSearch):
        return EpochTimeMinimize(section, bounds)
    return ThroughputKnee(section, bounds)


def check_sampler(section: BatchSizeSection, *, use_gpu: bool) -> None:
    """Raise JobError for a GPU's utilization without GPU; a job must name the CPU's sampler."""
    needs_utilization = isinstance(section, GpuUsageMaximizeSearch)
    if needs_utilization and not use_gpu and section.utilization.sampler == "auto":
        rule = (
            "must be cpu (the process's CPU time) if the job trains without a GPU, or choose "
            "another batch_size_search.strategy, such as throughput_knee"
        )
        raise JobError([Problem("batch_size_search.utilization.sampler", rule, "'auto'")])
