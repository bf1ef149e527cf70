"""Section of the job file about the search of the batch size before the training."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from raytrain_opt.config.section import Fraction, PositiveFloat, PositiveInt, Section, default_kind


class _BatchSizeSearch(Section):
    # A probe ends when the standard error of its samples/s, relative to it, is this small.
    relative_error: ClassVar[float] = 0.01
    needs_utilization: ClassVar[bool] = False  # it decides by the utilization of the device

    initial: PositiveInt = 32
    """First batch size per worker (32 in the paper, for small images)."""
    max_batch_size: PositiveInt | None = None
    """Largest batch size per worker; at most the training set / workers.count / the largest factor
    of batch_ramp. Default: the size at which lr_rule, or learning_rate.scaling, makes the rate 8
    times as large; no such limit with the rule none."""
    min_updates_per_epoch: PositiveInt = 20
    """Updates that a batch size must leave in each epoch. Where the job has fewer, its own size is
    the largest."""
    min_updates: PositiveInt = 500
    """Updates that a batch size must leave in the training, as above; with train_for at the
    measured speed."""
    memory_reserve: Fraction = 0.1
    """Fraction of the device's memory that stays free at the chosen size."""
    lr_rule: Literal["linear", "sqrt", "none"] = "linear"
    """How learning_rate.initial changes with the global batch size: proportionally to it, to its
    square root, or not at all."""
    max_probe_s: PositiveFloat = 10.0
    """Maximum timed duration of a probe, in seconds."""
    utilization_period_s: Annotated[PositiveFloat, Field(ge=0.05)] = 1.0
    """Seconds between samples of the device's utilization (1 s in the paper): of NVML for a GPU,
    else CPU time of the probe's process divided by the time of its threads."""


class ThroughputKneeSearch(_BatchSizeSearch):
    """Find the smallest batch size that is nearly as fast as the fastest (of this project)."""

    # Larger than for the published strategies, which probe each size once: this one repeats
    # probes that are too noisy to decide.
    relative_error: ClassVar[float] = 0.02

    strategy: Literal["throughput_knee"]
    tolerance: Annotated[PositiveFloat, Field(lt=1)] = 0.02
    """Fraction of the best samples/s to give up for a smaller batch size."""


class _Published(_BatchSizeSearch):
    max_loops: PositiveInt = 100
    """Maximum number of probes."""
    test_every: PositiveInt = 5
    """Probes between tests of convergence."""


class GpuUsageMaximizeSearch(_Published):
    """Change the batch size until the utilization of the device reaches a target (MBSO)."""

    needs_utilization: ClassVar[bool] = True

    strategy: Literal["gpu_usage_maximize"]
    target_pct: Annotated[PositiveFloat, Field(le=100)] = 99.0
    """Target utilization in percent: mean of the upper half of the samples."""


class EpochTimeMinimizeSearch(_Published):
    """Increase the batch size while the time of an epoch falls (MBSO)."""

    strategy: Literal["epoch_time_minimize"]


BatchSizeSection = Annotated[
    ThroughputKneeSearch | GpuUsageMaximizeSearch | EpochTimeMinimizeSearch,
    Field(discriminator="strategy"),
    default_kind("strategy", "throughput_knee"),
]
