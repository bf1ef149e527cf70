"""The job file about updates: optimiser, batch normalisation, batch ramp, gradients."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from raytrain_opt.config.section import (
    NamedSection,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class OptimizerSection(NamedSection):
    """An optimiser of torch.optim or of ours; its learning rate is what the policy sets."""

    name: str = Field(
        "SGD",
        description=(
            "Class name in torch.optim, LARS (You et al.), or RMSpropWarmup (Akiba et al.: "
            "RMSprop at first, momentum SGD later; its times are in epochs)."
        ),
    )
    args: dict[str, Any] = Field(
        default_factory=lambda: {"momentum": 0.9, "weight_decay": 1e-4},
        description="Its keyword arguments, all but lr.",
    )
    exclude: Literal["auto", "bias_and_norm", "none"] = Field(
        "auto",
        description=(
            "Parameters without weight decay and, with LARS, without trust ratio. bias_and_norm: "
            "biases and normalisation layers; auto: those with LARS, none with others."
        ),
    )

    @property
    def excludes_bias_and_norm(self) -> bool:
        """What `exclude` comes to."""
        return self.exclude == "bias_and_norm" or (self.exclude == "auto" and self.name == "LARS")

    @field_validator("args")
    @classmethod
    def _no_lr(cls, args: dict[str, Any]) -> dict[str, Any]:
        if "lr" in args:
            raise ValueError("lr is set by the learning-rate policy: use learning_rate.initial")
        return args

    @model_validator(mode="before")
    @classmethod
    def _defaults_are_sgds(cls, value: Any) -> Any:
        if isinstance(value, dict) and "args" not in value and value.get("name", "SGD") != "SGD":
            return {**value, "args": {}}
        return value


class BatchNormSection(Section):
    """Batch normalisation over several workers."""

    momentum: PositiveFloat | None = Field(
        None,
        le=1,
        description="Weight of a new batch in the running statistics. Default: the model's own.",
    )
    sync: bool = Field(
        False, description="Normalise by the statistics of all workers' batches (SyncBatchNorm)."
    )
    recalibrate_batches: NonNegativeInt = Field(
        0,
        description=(
            "Before every evaluation, take the running statistics anew from this many training "
            "batches of each worker; 0: keep those of the training, pooled over the workers."
        ),
    )


class RampStep(Section):
    """From `epoch` on, the global batch is `factor` times global_batch_size."""

    epoch: PositiveInt = Field(ge=2, description="First epoch (from 1) with the larger batch.")
    factor: PositiveInt = Field(ge=2, description="Of global_batch_size; rising.")


class ParallelSection(Section):
    """How the workers exchange gradients."""

    buckets: Literal["default", "growing", "auto"] = Field(
        "default",
        description=(
            "Messages that gradients travel in. default: torch's, 1 MiB and then 25 MiB; growing: "
            "cut at the model's layers in the order of its backward pass, 1 MiB at first and "
            "larger ones after; auto: try several during the first steps and keep the fastest."
        ),
    )
    compression: Literal["none", "bf16", "fp16"] = Field(
        "none", description="Send gradients in this form."
    )
    early_communicators: bool = Field(
        True,
        description=(
            "Set up the connections between workers while model and data are built, not in the "
            "first step."
        ),
    )
    noise_scale: bool = Field(
        True,
        description=(
            "Measure how noisy the gradients are (McCandlish et al.), from what the workers "
            "compute anyway, in one of 10 updates; the result says what a larger batch would cost "
            "in samples. With one worker there is nothing to compare."
        ),
    )
