"""From the job file's section to the batch-size strategy that it asks for."""

from __future__ import annotations

from raytrain_opt.config.batch_size import (
    BatchSizeSection,
    EpochTimeMinimizeSearch,
    GpuUsageMaximizeSearch,
)
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.search.batch_size import Limits, Strategy
from raytrain_opt.search.batch_size_knee import ThroughputKnee
from raytrain_opt.search.batch_size_published import EpochTimeMinimize, GpuUsageMaximize


def build_strategy(section: BatchSizeSection, limits: Limits) -> Strategy:
    """The strategy that the section names, with its settings."""
    if isinstance(section, GpuUsageMaximizeSearch):
        return GpuUsageMaximize(section, limits)
    if isinstance(section, EpochTimeMinimizeSearch):
        return EpochTimeMinimize(section, limits)
    return ThroughputKnee(section, limits)


def check_sampler(section: BatchSizeSection, *, use_gpu: bool) -> None:
    """Raises JobError when the strategy steers by a GPU's utilisation and there is none: the
    CPU's says something else, so that has to be asked for.
    """
    by_utilization = isinstance(section, GpuUsageMaximizeSearch)
    if by_utilization and not use_gpu and section.utilization.sampler == "auto":
        rule = (
            "must be cpu (the process's CPU time) where the job trains without a GPU, or choose "
            "another batch_size_search.strategy, such as throughput_knee"
        )
        raise JobError([Problem("batch_size_search.utilization.sampler", rule, "'auto'")])
