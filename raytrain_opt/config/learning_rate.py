"""Section of the job file about the learning rate: one class per policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from raytrain_opt.config.section import (
    BrokenRule,
    Fraction,
    Location,
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
# Table 4 of the paper, for 40 epochs: last epoch of the warm-up, and of narrow and middle.
_MIX_EPOCHS, _MIX_WARMUP, _MIX_ENDS = 40, 4, (19, 29)


# What a slot computes of each global batch: all of it, or one worker's part.
CandidateBatch = Literal["global", "local"]


# Where candidates are trained.
SearchOn = Literal["slots", "workers"]


class Warmup(Section):
    """The first epochs or updates: the rate rises to learning_rate.initial, or is below it."""

    epochs: NonNegativeInt = 0
    """Length of the warm-up in epochs; 0: no warm-up."""
    steps: PositiveInt | None = None
    """Length of the warm-up in updates, in place of epochs; only with policy schedule."""
    lr: PositiveFloat | None = None
    """Rate at the start (linear) or during the warm-up (constant). Default: learning_rate.initial
    / 20 (0.005 for 0.1, as in the paper)."""
    shape: Literal["linear", "constant"] = "linear"
    """How the rate changes during the warm-up."""

    def length(self, steps_per_epoch: int) -> int:
        """Return the length in updates."""
        return self.epochs * steps_per_epoch if self.steps is None else self.steps

    def broken_rules(self) -> Iterator[BrokenRule]:
        if self.steps is not None and self.epochs:
            yield "steps", "is given in place of epochs; remove one of the two"


class Scaling(Section):
    """Scale `initial`, given for another global batch size, to the job's."""

    reference_batch_size: PositiveInt
    """Global batch size that `initial` is given for (256 for the usual 0.1)."""
    rule: Literal["linear", "sqrt"] = "linear"
    """initial x (global_batch_size / reference_batch_size), or its square root."""


_SEARCH_ON = (
    "slots: each candidate trains on one device, the candidates of a round side by side; workers: "
    "each trains on all workers, as the model does, one after the other, and no slots are "
    "started."
)
# SGD's usual rate; trained weights take a part of it, as more destroys what they have learned.
SGD_LR, FINE_TUNING_DIVISOR = 0.1, 10

_SCALING = "Scale `initial` to the global batch size. Default: no scaling."


class _Policy(Section):
    """What policies can do.

    `has_candidates`: it trains candidates; `searches_first`: only before the first epoch, and the
    search chooses the optimizer too. `is_found`: its schedule is what such a search finds or has
    found: the rate falls to 0, an average of the weights shows what that will bring, and the
    weight decay may be set for each epoch.

    Each class also has `max_candidates` of a round, `search_on`, `warmup` and `candidate_batch`.
    """

    has_candidates: ClassVar[bool] = False
    searches_first: ClassVar[bool] = False
    is_found: ClassVar[bool] = False
    is_recorded: ClassVar[bool] = False  # with the batch size and the length of its run

    policy: str

    @property
    def summary(self) -> str:
        """The policy and its most important settings."""
        names, fields = ("shape", "initial", "candidates", "alpha", "schedule"), vars(self)
        return ", ".join([self.policy, *(f"{n} {fields[n]}" for n in names if fields.get(n))])

    @property
    def follows_metric(self) -> bool:
        """Whether the rate follows the metric of the validation split."""
        return False

    @property
    def decays(self) -> bool:
        """Whether the rate falls until the last epoch."""
        return self.is_found

    @property
    def can_be_constant(self) -> bool:
        """Whether the rate may stay constant after the warm-up."""
        return self.is_found


class StptPolicy(_Policy):
    """Choose the rate of each epoch by training candidates for a few steps (Yamada et al.)."""

    has_candidates: ClassVar[bool] = True

    policy: Literal["stpt"]
    initial: PositiveFloat = 0.1
    """Base learning rate of the first round."""
    scaling: Scaling | None = Field(None, description=_SCALING)
    candidates: (
        Literal["narrow", "middle", "wide", "alpha_study", "mix"]
        | Annotated[list[PositiveFloat], Field(max_length=100)]
    ) = "mix"
    """Multipliers of the base rate: a set of the paper, its Mix schedule (boundaries scaled to the
    number of epochs), or a list of your own."""
    alpha: PositiveInt | Annotated[PositiveFloat, Field(le=1)] = 0.08
    """Length of a candidate's training: steps (200) or part of an epoch (0.08)."""
    candidate_batch: CandidateBatch = "global"
    """global: a candidate trains on the full global batch in each step; local: on one worker's
    part of it, at a rate that is scaled linearly."""
    search_on: SearchOn = Field("slots", description=_SEARCH_ON)
    warmup: Warmup | None = None
    """Warm-up without candidates. Default: 4/40 of the epochs for mix, else none."""

    @field_validator("candidates")
    @classmethod
    def _refuse_empty_and_repeated(cls, value: Any) -> Any:
        if isinstance(value, list) and (not value or len(set(value)) != len(value)):
            raise ValueError("give at least one multiplier, each of them once")
        return value

    def broken_rules(self) -> Iterator[BrokenRule]:
        if self.warmup is not None and self.warmup.steps is not None:
            yield "warmup.steps", "is for policy schedule; give whole epochs"

    def multipliers(self, epoch: int, epochs: int) -> tuple[float, ...]:
        """Return the multipliers of an epoch, from 1, in a training of `epochs`."""
        if isinstance(self.candidates, list):
            return tuple(self.candidates)
        if self.candidates != "mix":
            return LR_SETS[self.candidates]
        ends = (round(last * epochs / _MIX_EPOCHS) for last in _MIX_ENDS)
        return LR_SETS[("narrow", "middle", "wide")[sum(epoch > end for end in ends)]]

    def warmup_in(self, epochs: int) -> Warmup:
        """Return the warm-up; by default the paper's for mix (4 of 40 epochs), else none."""
        usual = round(_MIX_WARMUP * epochs / _MIX_EPOCHS) if self.candidates == "mix" else 0
        return self.warmup or Warmup(epochs=usual)

    def alpha_steps(self, steps: int) -> int:
        """Return the steps of a pre-training in an epoch of `steps`."""
        return self.alpha if isinstance(self.alpha, int) else max(1, round(self.alpha * steps))

    @property
    def max_candidates(self) -> int:
        """Candidates of a round; 0 for a single one, which is no search."""
        count = len(self.multipliers(1, 1))  # as many in each epoch
        return count if count > 1 else 0


class HorizonPolicy(_Policy):
    """Find the peak rate of a warm-up and decay by training with compressed schedules.

    A development of Yamada et al. against the short-horizon bias (Wu et al., ICLR 2018).
    """

    warmup: ClassVar[None] = None  # warmup_fraction instead
    candidate_batch: ClassVar[None] = None
    has_candidates: ClassVar[bool] = True
    max_candidates: ClassVar[int] = 3
    searches_first: ClassVar[bool] = True
    is_found: ClassVar[bool] = True

    policy: Literal["stpt_horizon"]
    initial: PositiveFloat | None = Field(
        None,
        description=(
            "Rate at which the search starts; a factor of 100 off is fine. Trainings that are too "
            "short for a search use it. Several optimizers start at their usual rates times "
            f"initial / {SGD_LR:g}. Default: {SGD_LR:g}; with one optimizer, its usual rate; with "
            "model.weights, a tenth of that."
        ),
    )
    scaling: Scaling | None = Field(None, description=_SCALING)
    shape: Literal["linear", "cosine"] = "linear"
    """How the rate falls from its peak to 0 after the warm-up."""
    warmup_fraction: Fraction | None = None
    """Fraction of the training in which the rate rises from 0 to its peak. Default: 0.2 with LARS,
    else 0.1."""
    max_search_cost: Annotated[PositiveFloat, Field(le=1)] | Literal["auto"] = "auto"
    """Limit of the search, as a fraction of the samples of the training. auto: 0.2; in a small
    training more, up to 1: 300 updates, and 1,000 more if the result is not clear."""
    search_on: SearchOn | None = Field(
        None, description=f"{_SEARCH_ON} Default: workers; slots with parallel.mode: async."
    )


_FIELDS_OF_SHAPES = {
    "final": ("linear", "polynomial", "cosine"),
    "gamma": ("multistep", "plateau"),
    "milestones": ("multistep",),
    "patience": ("plateau",),
    "power": ("polynomial",),
    "half_epoch": ("arc_cotangent",),
    "steepness": ("arc_cotangent",),
}


class SchedulePolicy(_Policy):
    """Train with a fixed schedule; no candidates."""

    max_candidates: ClassVar[int] = 0
    candidate_batch: ClassVar[None] = None
    search_on: ClassVar[SearchOn] = "slots"

    policy: Literal["schedule"]
    initial: PositiveFloat = 0.1
    """Rate after the warm-up, the peak of the schedule."""
    scaling: Scaling | None = Field(None, description=_SCALING)
    shape: Literal[
        "constant", "multistep", "plateau", "linear", "polynomial", "cosine", "arc_cotangent"
    ] = "cosine"
    """How the rate falls after the warm-up."""
    final: NonNegativeFloat = 0.0
    """Rate at the end (linear, polynomial, cosine)."""
    gamma: PositiveFloat = 0.1
    """Factor of the rate at each step (multistep, plateau)."""
    milestones: list[PositiveInt] = Field(default_factory=list)
    """Epochs after which the rate is multiplied (multistep)."""
    patience: PositiveInt = 4
    """The rate drops after more epochs in a row than this without a new best value of the task's
    metric, such as accuracy, on the validation split, which is then held out; counted after the
    warm-up (plateau)."""
    power: PositiveFloat = 2.0
    """Exponent (polynomial)."""
    half_epoch: PositiveFloat | None = None
    """Epoch, from the start of training, at which the rate is half of `initial` (arc_cotangent).
    Default: the middle of the epochs after the warm-up."""
    steepness: PositiveFloat = 0.2
    """k of f(x) = k x, x in epochs; larger falls faster (arc_cotangent)."""
    warmup: Warmup = Field(default_factory=Warmup)
    """The first epochs."""

    @property
    def follows_metric(self) -> bool:
        return self.shape == "plateau"

    @property
    def decays(self) -> bool:
        return self.shape in ("linear", "polynomial", "cosine")

    @property
    def can_be_constant(self) -> bool:
        return self.shape == "constant"

    def broken_rules(self) -> Iterator[BrokenRule]:
        for name, shapes in _FIELDS_OF_SHAPES.items():
            default = type(self).model_fields[name].get_default(call_default_factory=True)
            if self.shape not in shapes and getattr(self, name) != default:
                yield (name, f"is not for shape {self.shape}, but for {', '.join(shapes)}")
        if self.shape == "multistep" and not self.milestones:
            yield "milestones", "are required with shape multistep, at least one"
        if self.milestones != sorted(set(self.milestones)):
            yield "milestones", "must increase"
        if self.half_epoch is not None and self.half_epoch <= self.warmup.epochs:
            yield "half_epoch", f"is within the warm-up of {self.warmup.epochs} epochs"


class ReplayPolicy(_Policy):
    """Train with the schedule that an earlier run found; no candidates."""

    initial: ClassVar[float] = 1.0  # never used: nothing scales a replay
    scaling: ClassVar[None] = None
    warmup: ClassVar[None] = None
    candidate_batch: ClassVar[None] = None
    max_candidates: ClassVar[int] = 0
    is_found: ClassVar[bool] = True
    is_recorded: ClassVar[bool] = True
    search_on: ClassVar[SearchOn] = "slots"

    policy: Literal["replay"]
    schedule: Location
    """Path of the schedule.jsonl of that run."""


LearningRateSection = Annotated[
    StptPolicy | SchedulePolicy | ReplayPolicy | HorizonPolicy, Field(discriminator="policy")
]
