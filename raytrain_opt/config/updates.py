"""Sections of the job file about updates: optimizer, batch norm, batch ramp, gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from raytrain_opt.config.section import (
    BrokenRule,
    NamedSection,
    NameOrFunction,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


@dataclass(frozen=True)
class Traits:
    """What an optimizer is like.

    `usual_lr`: its rate in small networks and short trainings, if known. `usual_warmup`: the
    default warm-up, as a fraction of the training. `excludes_bias_and_norm`: by default biases and
    normalization layers get no weight decay. `auto_weight_decay`: the policy may choose the decay.
    `schedule_free`: it averages its weights in place of a decay of the rate. `second_rule`: only
    matrices follow its own rule. `counts_updates`: its rule changes with the number of updates.
    """

    usual_lr: float | None = None
    usual_warmup: float = 0.1
    excludes_bias_and_norm: bool = False
    auto_weight_decay: bool = False
    schedule_free: bool = False
    second_rule: bool = False
    counts_updates: bool = False


OPTIMIZERS = {
    "Adagrad": Traits(0.01),
    "Adam": Traits(0.003),
    "AdamW": Traits(0.003, auto_weight_decay=True),
    # The best of six rates on three of five tasks (benchmarks/RESULTS.md).
    "LARS": Traits(2.0, usual_warmup=0.2, excludes_bias_and_norm=True),
    "Muon": Traits(0.1, excludes_bias_and_norm=True, auto_weight_decay=True, second_rule=True),
    "NAdam": Traits(0.003),
    "RAdam": Traits(0.003),
    "RMSpropWarmup": Traits(counts_updates=True),
    "SGD": Traits(0.1),  # with momentum
    "ScheduleFreeAdamW": Traits(0.0025, schedule_free=True),
    "ScheduleFreeSGD": Traits(1.0, schedule_free=True),
}
# The rate of Muon's second rule relative to the matrices' rate, by `aux`. SGD hardly moves
# embeddings and gains; with AdamW, 0.05 and 0.15 end alike (benchmarks/RESULTS.md).
MUON_AUX_LR_MULTIPLIERS = {"adamw": 0.05, "sgd": 1.0}


def _default_args(section: dict[str, Any]) -> dict[str, Any]:
    return {"momentum": 0.9, "weight_decay": 1e-4} if section.get("name", "SGD") == "SGD" else {}


class OptimizerSection(NamedSection):
    """An optimizer of torch.optim or of this package; the policy sets its learning rate."""

    name: NameOrFunction = "SGD"
    """A class of torch.optim, LARS (You et al.), Muon (Jordan et al.; also for convolutions,
    biases and normalization), RMSpropWarmup (Akiba et al.; its times are in epochs),
    ScheduleFreeSGD or ScheduleFreeAdamW (Defazio et al.; at a constant rate), or a class of your
    own as package.module:Class."""
    args: dict[str, Any] = Field(default_factory=_default_args)
    """Keyword arguments of the optimizer, without lr. With Muon and AdamW, `weight_decay: auto`
    lets policy stpt_horizon choose the decay of each epoch."""
    no_weight_decay: Literal["auto", "bias_and_norm", "none"] = "auto"
    """Parameters without weight decay and, with LARS, without trust ratio. bias_and_norm: biases
    and normalization layers; auto: bias_and_norm with LARS and Muon, else none."""
    lr_multipliers: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Factors of the learning rate by patterns of parameter names, such as `{"fc.*": 10}`; the
    first that matches a parameter counts."""
    clip_norm: PositiveFloat | None = None
    """Norm to which the gradient of a global batch is scaled down. Default: no clipping."""

    @property
    def traits(self) -> Traits:
        """What this optimizer is like."""
        return OPTIMIZERS.get(str(self.name), Traits())

    @property
    def has_auto_weight_decay(self) -> bool:
        """Whether the policy chooses the weight decay of each epoch."""
        return bool(self.args.get("weight_decay") == "auto")

    def without_auto_weight_decay(self) -> OptimizerSection:
        args = {n: v for n, v in self.args.items() if v != "auto"}
        return self.model_copy(update={"args": args})

    @property
    def constructor_args(self) -> dict[str, Any]:
        """The arguments, with a weight decay of 1 for auto: the policy's factor is the decay."""
        return {**self.args, "weight_decay": 1.0} if self.has_auto_weight_decay else self.args

    @property
    def is_schedule_free(self) -> bool:
        """Whether it averages its weights in place of a decay of the rate."""
        return self.traits.schedule_free

    @property
    def excludes_bias_and_norm(self) -> bool:
        """Whether biases and normalization layers get no weight decay."""
        return self.no_weight_decay == "bias_and_norm" or (
            self.no_weight_decay == "auto" and self.traits.excludes_bias_and_norm
        )

    @property
    def group_lr_multipliers(self) -> dict[str, float]:
        """Return all factors of the rate that are not 1; of Muon also its second rule's."""
        aux = {}
        if self.traits.second_rule:
            rule = str(self.args.get("aux", "sgd"))
            factor = self.args.get("aux_lr_multiplier", MUON_AUX_LR_MULTIPLIERS.get(rule, 1.0))
            aux = {"aux" if rule == "adamw" else f"aux {rule}": factor}
        return {k: f for k, f in {**aux, **self.lr_multipliers}.items() if f != 1}

    def broken_rules(self) -> Iterator[BrokenRule]:
        if self.has_auto_weight_decay and not self.traits.auto_weight_decay:
            yield "args.weight_decay", f"auto is for Muon and AdamW; give {self.name} a number"


class OptimizerChoiceSection(OptimizerSection):
    """An optimizer, or several among which the search chooses."""

    candidates: list[OptimizerSection] = Field(default_factory=list)
    """With name: auto, the search of policy stpt_horizon chooses among these: the first one,
    unless another is better by more than noise. Where there are too few steps for that, or they
    learn too little, the first one trains. Default: Muon, SGD, ScheduleFreeSGD, AdamW; for a
    network without BatchNorm, GroupNorm or InstanceNorm: Muon, AdamW, SGD, ScheduleFreeSGD; both
    without Muon where its steps would take several times as long."""

    @property
    def is_choice(self) -> bool:
        """Whether the search chooses the optimizer."""
        return self.name == "auto"

    @property
    def choices(self) -> tuple[OptimizerSection, ...]:
        """The optimizers to choose from; this one alone unless it is `auto`."""
        if not self.is_choice:
            return (self,)
        shared = self.lr_multipliers
        return tuple(
            choice.model_copy(
                update={
                    "lr_multipliers": {**choice.lr_multipliers, **shared, **choice.lr_multipliers},
                    "clip_norm": choice.clip_norm or self.clip_norm,
                }
            )
            for choice in self.candidates or _usual_optimizers(channel_norm=True, embeddings=False)
        )

    @property
    def chooses_freely(self) -> bool:
        """Whether the job leaves the list to the program."""
        return self.is_choice and not self.candidates

    def usual(self, *, channel_norm: bool, embeddings: bool, muon: bool) -> OptimizerChoiceSection:
        """Return the choice among the usual optimizers of a network, with or without Muon.

        `channel_norm`: it has BatchNorm, GroupNorm or InstanceNorm.
        """
        usual = _usual_optimizers(channel_norm=channel_norm, embeddings=embeddings)
        candidates = [choice for choice in usual if muon or not choice.traits.second_rule]
        return self.model_copy(update={"candidates": candidates})

    def broken_rules(self) -> Iterator[BrokenRule]:
        yield from super().broken_rules()
        if self.is_choice:
            for name in ("args", "no_weight_decay"):
                if getattr(self, name) not in ({}, "auto"):
                    yield name, "belongs to one optimizer: write it in optimizer.candidates"
            if any(candidate.name == "auto" for candidate in self.candidates):
                yield "candidates", "must be optimizers; auto cannot contain auto"
        elif self.candidates:
            yield "candidates", f"belongs to name: auto; {self.name} is one optimizer"


def _usual_optimizers(*, channel_norm: bool, embeddings: bool) -> tuple[OptimizerSection, ...]:
    """Return the optimizers that the search compares; the first is preferred."""
    aux = {} if channel_norm and not embeddings else {"aux": "adamw"}
    muon = OptimizerSection(name="Muon", args={"weight_decay": "auto", **aux})
    adamw = OptimizerSection(name="AdamW", args={"weight_decay": "auto"})
    sgd = (OptimizerSection(name="SGD"), OptimizerSection(name="ScheduleFreeSGD"))
    return (muon, *sgd, adamw) if channel_norm else (muon, adamw, *sgd)


class BatchNormSection(Section):
    """Running averages of batch normalization."""

    momentum: PositiveFloat | None = Field(None, le=1)
    """Weight of a new batch in the running statistics. Default: the model's."""
    recalibrate_batches: NonNegativeInt = 0
    """First steps of the epoch from which the running averages are recomputed before every
    evaluation; 0: use those of the training."""


class RampStep(Section):
    """Use `factor` times global_batch_size from `epoch` on."""

    epoch: PositiveInt = Field(ge=2)
    """First epoch with the larger batch, counted from 1."""
    factor: PositiveInt = Field(ge=2)
    """Factor of global_batch_size; must increase from step to step."""


class ParallelSection(Section):
    """How workers exchange gradients."""

    mode: Literal["sync", "async"] = "sync"
    """sync: all workers take each step together (DDP), and faster ones compute more micro-batches
    of it. async: each worker pulls weights and pushes gradients on its own, and each gradient is
    an update when it arrives (parameter server)."""
    micro_batches: PositiveInt | None = None
    """Micro-batches that a global batch is split into; not with batch_size_search. BatchNorm
    normalizes each. sync: at least one per worker. The same number gives the same weights, to the
    bit, on any number of workers; with several per worker, shares follow measured speeds. Default:
    workers.count. async: a multiple of workers.count; default: at most 4 per worker, of at least 8
    samples."""
    staleness_bound: NonNegativeInt | None = None
    """async only: maximum number of updates between reading weights and applying the gradient,
    for which workers wait; P equal workers have about P. null: no bound."""
    gradient_buckets: list[PositiveInt] | None = Field(None, min_length=1)
    """Sizes in MiB of the messages with gradients, in the order of the backward pass; the last
    size holds for the rest. torch before 2.15 uses the last size only. Small messages first let
    the exchange begin early. null: as in torch, 1 MiB and then 25 MiB."""
    compression: Literal["none", "bf16", "fp16"] = "none"
    """Data type in which gradients are sent; none: unchanged."""

    @property
    def common_steps(self) -> bool:
        """Whether all workers take each step together."""
        return self.mode != "async"

    def broken_rules(self) -> Iterator[BrokenRule]:
        for name, mode in (("gradient_buckets", "sync"), ("staleness_bound", "async")):
            if getattr(self, name) is not None and self.mode != mode:
                yield name, f"belongs to parallel.mode: {mode}"
