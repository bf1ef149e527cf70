"""The job file about updates: optimiser, batch normalisation, batch ramp, gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from raytrain_opt.config.section import (
    BrokenRule,
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

    mode: Literal["sync", "async"] = Field(
        "sync",
        description=(
            "sync: all workers take each step together (DDP). async: they pull weights and push "
            "gradients by themselves, and nobody waits for a slow one (a parameter server)."
        ),
    )
    staleness_bound: NonNegativeInt | None = Field(
        4,
        description=(
            "With async: no gradient goes into weights that were updated more than this many "
            "times since it read them, and no worker is further ahead of the slowest. 0: the "
            "result of sync; null: no bound."
        ),
    )
    staleness_lr: bool = Field(
        False,
        description="With async: divide each gradient by 1 + its staleness.",
    )
    shards: PositiveInt | None = Field(
        None,
        description=(
            "With async: processes that hold the weights and the optimiser's state, each a part "
            "of the tensors. Default: one per node."
        ),
    )
    snapshot_every: PositiveInt = Field(
        100,
        description=(
            "With async: updates after which a shard's part is copied to another process. A shard "
            "that dies loses as many updates of its part at most."
        ),
    )
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

    def broken_rules(self) -> Iterator[BrokenRule]:
        """Settings of the other mode, which would do nothing."""
        other = _ONLY_SYNC if self.mode == "async" else _ONLY_ASYNC
        for name in other:
            if getattr(self, name) != type(self).model_fields[name].default:
                mode = "sync" if self.mode == "async" else "async"
                yield name, f"belongs to parallel.mode: {mode}"


_ONLY_SYNC = ("buckets",)
_ONLY_ASYNC = ("staleness_bound", "staleness_lr", "shards", "snapshot_every")
