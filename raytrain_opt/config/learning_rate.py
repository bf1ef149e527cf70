"""The part of the job file that says how the learning rate is chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from raytrain_opt.config.section import (
    BrokenRule,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

LR_SETS: dict[str, tuple[float, ...]] = {
    "alpha_study": (10.0, 5.0, 3.0, 1.5, 1.0, 0.9, 0.5, 0.4),
    "narrow": (1.25, 1.17, 1.08, 1.00, 0.95, 0.90, 0.85, 0.80),
    "middle": (2.50, 2.00, 1.50, 1.00, 0.85, 0.70, 0.55, 0.40),
    "wide": (5.00, 3.67, 2.33, 1.00, 0.80, 0.60, 0.40, 0.20),
}


class Warmup(Section):
    """A gentle start: the rate climbs to learning_rate.initial, or stays low, then jumps."""

    epochs: NonNegativeInt = Field(0, description="Whole epochs; 0: none.")
    lr: PositiveFloat | None = Field(
        None,
        description=(
            "Rate at the start (linear) or all along. Default: a twentieth of "
            "learning_rate.initial, the paper's 0.005 for 0.1."
        ),
    )
    shape: Literal["linear", "constant"] = Field("linear", description="How it gets there.")

    def start_lr(self, initial: float) -> float:
        """The rate it starts at, on its way to `initial`."""
        return initial / 20 if self.lr is None else self.lr


class Scaling(Section):
    """`initial` is meant for another global batch; the job's own follows by a rule."""

    reference_batch_size: PositiveInt = Field(
        description="Global batch that `initial` is meant for; 256 for ImageNet's usual 0.1."
    )
    rule: Literal["linear", "sqrt"] = Field(
        "linear",
        description="initial x (global_batch_size / reference_batch_size), or its square root.",
    )


_SCALING = "Scale `initial` to the job's global batch. Default: it is taken as it stands."


class CandidatePolicy(Section):
    """What policies that try candidates have in common."""

    policy: str
    combine: Literal["best", "average", "top_k_average"] = Field(
        "best",
        description=(
            "Whose weights go on after a round that keeps steps. best: the winner's; average: the "
            "mean of all candidates that did not diverge; top_k_average: of the top_k best. The "
            "learning rate is the winner's in any case."
        ),
    )
    top_k: Annotated[int, Field(ge=2)] = Field(
        3, description="Candidates in the mean (top_k_average)."
    )


class StptPolicy(CandidatePolicy):
    """Choose the rate each epoch by short pre-training of candidates (Yamada et al.)."""

    policy: Literal["stpt"]
    initial: PositiveFloat = Field(0.1, description="Base learning rate of the first round.")
    scaling: Scaling | None = Field(None, description=_SCALING)
    candidates: Literal["narrow", "middle", "wide", "alpha_study", "mix"] | list[PositiveFloat] = (
        Field(
            "mix",
            description=(
                "Multipliers of the base rate: one of the paper's sets, its Mix schedule "
                "(boundaries scaled to the number of epochs), or your own list."
            ),
        )
    )
    include: list[PositiveFloat] = Field(
        default_factory=list, description="Multipliers always among the candidates, e.g. [1.0]."
    )
    alpha: PositiveInt | Annotated[float, Field(gt=0, le=1)] = Field(
        0.08,
        description="Length of a pre-training: iterations (200) or share of an epoch (0.08).",
    )
    candidate_batch: Literal["global", "local"] = Field(
        "global",
        description=(
            "global: a candidate processes the whole global batch each iteration; local: one "
            "worker's share of it, with the rate scaled linearly."
        ),
    )
    score: Literal["val_accuracy", "val_loss"] = Field(
        "val_accuracy", description="What ranks the candidates, on the selection split."
    )
    max_halvings: NonNegativeInt = Field(
        5, description="Rounds repeated at half the base rate when every candidate diverges."
    )
    warmup: Warmup | None = Field(
        None,
        description="Epochs without candidates. Default: 4/40 of the epochs for mix, else none.",
    )

    @field_validator("candidates")
    @classmethod
    def _some_and_distinct(cls, value: Any) -> Any:
        if isinstance(value, list) and (not value or len(set(value)) != len(value)):
            raise ValueError("give at least one multiplier, each once")
        return value


class HorizonPolicy(CandidatePolicy):
    """Find the peak of a warm-up and decay by trying whole schedules, squeezed into few steps.

    Ours, after Yamada et al. and against the short-horizon bias (Wu et al., ICLR 2018).
    """

    policy: Literal["stpt_horizon"]
    initial: PositiveFloat = Field(
        0.1, description="Where the search begins; it may be wrong by a factor of 100."
    )
    scaling: Scaling | None = Field(None, description=_SCALING)
    shape: Literal["linear", "cosine"] = Field(
        "linear", description="How the rate falls from its peak to 0, after the warm-up."
    )
    warmup_share: Fraction = Field(
        0.1, description="Share of the training in which the rate climbs from 0 to its peak."
    )
    horizon: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5,
        description="Length of a candidate's squeezed schedule, in epochs, where budget allows.",
    )
    budget: Annotated[float, Field(gt=0, le=1)] = Field(
        0.2, description="What the search may cost: share of the training's samples."
    )
    search_weight_decay: bool = Field(
        False,
        description=(
            "Also try a tenth and ten times the optimizer's weight decay, once, with the peak "
            "that was found."
        ),
    )
    rounds_at: list[Fraction] = Field(
        default_factory=lambda: [0.125, 0.25, 0.5],
        description=(
            "Shares of the training after which half and twice the rate are tried, for as long "
            "as that changes something and the budget lasts. They also are when the training loss "
            "stalls or suddenly rises. []: only then."
        ),
    )


class SchedulePolicy(Section):
    """A learning rate written down beforehand; no candidates."""

    policy: Literal["schedule"]
    initial: PositiveFloat = Field(0.1, description="Rate after the warm-up; the schedule's peak.")
    scaling: Scaling | None = Field(None, description=_SCALING)
    shape: Literal[
        "constant", "step", "multistep", "linear", "polynomial", "cosine", "arc_cotangent"
    ] = Field("cosine", description="How the rate falls after the warm-up.")
    final: NonNegativeFloat = Field(
        0.0, description="Rate at the end (linear, polynomial, cosine)."
    )
    gamma: PositiveFloat = Field(0.1, description="Factor at each step (step, multistep).")
    every_epochs: PositiveInt = Field(30, description="Epochs between steps (step).")
    milestones: list[PositiveInt] = Field(
        default_factory=list, description="Epochs after which the rate is multiplied (multistep)."
    )
    power: PositiveFloat = Field(2.0, description="Exponent (polynomial).")
    half_epoch: PositiveFloat | None = Field(
        None,
        description=(
            "Epoch, from the start of training, at which the rate is half of `initial` "
            "(arc_cotangent). Default: the middle of what the warm-up leaves."
        ),
    )
    steepness: PositiveFloat = Field(
        0.2, description="k of f(x) = k x, x in epochs (arc_cotangent): larger falls faster."
    )
    warmup: Warmup = Field(
        default_factory=lambda: Warmup(epochs=0, lr=None, shape="linear"),
        description="The gentle start.",
    )

    def broken_rules(self) -> Iterator[BrokenRule]:
        """Milestones where they belong; half of the rate after the warm-up."""
        if (self.shape == "multistep") != bool(self.milestones):
            yield "milestones", "go with shape multistep, and it needs at least one"
        if self.milestones != sorted(set(self.milestones)):
            yield "milestones", "must increase"
        if self.half_epoch is not None and self.half_epoch <= self.warmup.epochs:
            yield "half_epoch", f"lies within the warm-up of {self.warmup.epochs} epochs"


class ReplayPolicy(Section):
    """Train with the schedule that an earlier run found; no candidates."""

    policy: Literal["replay"]
    schedule: str = Field(description="Path of that run's schedule.json.")


LearningRateSection = Annotated[
    StptPolicy | SchedulePolicy | ReplayPolicy | HorizonPolicy, Field(discriminator="policy")
]
