"""The part of the job file that says how the batch size is chosen before the training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raytrain_opt.config.section import Fraction, PositiveFloat, PositiveInt, Section


class UtilizationSection(Section):
    """How busy the device is while a probe runs."""

    sampler: Literal["auto", "nvml", "cpu"] = Field(
        "auto",
        description=(
            "nvml: the GPU's utilisation; cpu: CPU time of the probe's process over the time of "
            "its threads; auto: nvml on a GPU, else cpu (which gpu_usage_maximize does not take)."
        ),
    )
    period_s: Annotated[float, Field(ge=0.05, allow_inf_nan=False)] = Field(
        1.0, description="Between samples; the paper's 1 s, at least 0.05."
    )


class _BatchSizeSearch(Section):
    start: PositiveInt = Field(
        32, description="First batch size per worker; the paper's 32 for small images."
    )
    max_batch_size: PositiveInt | None = Field(
        None, description="Largest per worker. Default: a worker's share of the training set."
    )
    memory_reserve: Fraction = Field(
        0.1, description="Share of the device's memory that stays free at the chosen size."
    )
    lr_rule: Literal["linear", "sqrt", "none"] = Field(
        "linear",
        description=(
            "How learning_rate.initial follows the global batch size: in proportion to it, to "
            "its square root, or not at all."
        ),
    )
    warmup_steps: PositiveInt = Field(
        3, description="Steps of a probe that are not timed; fewer after half a second."
    )
    min_steps: PositiveInt = Field(
        5, description="Timed steps of a probe, at least; after a second two are enough."
    )
    precision: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.01,
        description="A probe ends when the standard error of its samples/s is this share of it,",
    )
    max_seconds: PositiveFloat = Field(10.0, description="or after this many timed seconds.")
    utilization: UtilizationSection = Field(
        default_factory=lambda: UtilizationSection(sampler="auto"),
        description="How busy the device is.",
    )

    @property
    def measures_noise(self) -> bool:
        """Whether probes also measure how noisy gradients are."""
        return False


class ThroughputKneeSearch(_BatchSizeSearch):
    """The smallest batch size that is about as fast as the fastest; ours."""

    strategy: Literal["throughput_knee"]
    objective: Literal["samples_per_s", "goodput"] = Field(
        "samples_per_s",
        description=(
            "What is to be large. goodput: samples/s times the progress that a sample makes, "
            "which falls when the global batch nears the gradient noise scale."
        ),
    )
    tolerance: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.02, description="Share of the best objective that may be given up for a smaller size."
    )
    precision: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.02,
        description=(
            "As for the published strategies, which look at each size once and so need 0.01; "
            "this one repeats what is too noisy to decide on."
        ),
    )
    max_probes: PositiveInt = Field(12, description="Measurements at most, repeats included.")

    @property
    def measures_noise(self) -> bool:
        """Goodput is made of it."""
        return self.objective == "goodput"


class _Published(_BatchSizeSearch):
    max_loops: PositiveInt = Field(100, description="Probes at most.")
    test_every: PositiveInt = Field(5, description="Loops between tests of convergence.")


class GpuUsageMaximizeSearch(_Published):
    """Grow or shrink until the device's utilisation reaches a target (MBSO, published)."""

    strategy: Literal["gpu_usage_maximize"]
    target_pct: Annotated[float, Field(gt=0, le=100)] = Field(
        99.0, description="Utilisation to reach, mean of the top half of the samples."
    )
    converged_within: PositiveInt = Field(
        5, description="Converged: the size moved by no more than this since the last test."
    )


class EpochTimeMinimizeSearch(_Published):
    """Grow while an epoch gets faster (MBSO, published)."""

    strategy: Literal["epoch_time_minimize"]
    converged_within: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.05,
        description="Converged: the improvement moved by no more than this since the last test.",
    )


BatchSizeSection = Annotated[
    ThroughputKneeSearch | GpuUsageMaximizeSearch | EpochTimeMinimizeSearch,
    Field(discriminator="strategy"),
]
