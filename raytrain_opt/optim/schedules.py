"""Learning-rate schedules: pure functions of the step, known before the training.

    t        step: optimizer updates done, counted from 0; may be fractional
    T        steps of the decay; at t = T, the end of the last step, the rate is `final`
    w        steps of the warm-up
    a, b     initial and final rate           g    gamma, factor of each drop
    e        step at which the rate is a/2    k    steepness, per step

    Constant      a
    MultiStep     a g^(milestones <= t)
    Polynomial    b + (a - b) (1 - t/T)^power
    Cosine        b + (a - b) (1 + cos(pi t/T)) / 2
    ArcCotangent  (a / pi) arccot(k (t - e)), arccot in (0, pi)
    Warmup        t < w: linear   s + (a - s) t/w, or constant   s;  then the schedule after it
                  s    starting rate of the warm-up

Beyond T the decays stay at `final`; the arc-cotangent has no T and never ends. All schedules
are frozen, picklable and free of torch.
Sources: gradual warm-up, Goyal et al. 2017 (arXiv 1706.02677); cosine, Loshchilov and Hutter,
SGDR, ICLR 2017; arc-cotangent, Honda, Miwa, Yamazaki et al. 2019 (ResNet-50 in 74.7 s), whose
printed formula adds a/2 and so contradicts their text and figure: this one agrees with both.

Scaling rules: the learning rate for another global batch size.

    B, lr    reference batch size and its learning rate        B', lr'    the new ones

    linear   lr' = lr B' / B          one update moves as far as B' / B of the earlier ones:
                                      Goyal et al. 2017 (arXiv 1706.02677)
    sqrt     lr' = lr sqrt(B' / B)    the variance of an update stays the same:
                                      Krizhevsky 2014 (arXiv 1404.5997)
    none     lr' = lr

Both rules hold up to a batch size that depends on the model and the data; for large B' / B,
start with a warm-up.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal, Protocol

from raytrain_opt.config.learning_rate import SchedulePolicy
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.optim.epoch_steps import EpochSpan


class Schedule(Protocol):
    """A learning rate for each optimizer update."""

    def lr(self, step: float) -> float:
        """Return the rate of update number `step`, counted from 0.

        Fractional steps occur when a larger batch leaves fewer updates in an epoch: they follow
        the same schedule in longer strides.
        """


@dataclass(frozen=True)
class Constant:
    """The rate `initial` at every step."""

    initial: float

    def lr(self, step: float) -> float:
        return self.initial


@dataclass(frozen=True)
class MultiStep:
    """Drops by the factor `gamma` at each milestone; milestones are steps in rising order."""

    initial: float
    gamma: float
    milestones: tuple[int, ...]

    def lr(self, step: float) -> float:
        drops = bisect_right(self.milestones, step)
        return self.initial * math.pow(self.gamma, drops)


@dataclass(frozen=True)
class Polynomial:
    """A power of the remaining steps: a straight line, or steep at first and flat at the end."""

    initial: float
    final: float
    steps: int
    power: float = 1.0

    def lr(self, step: float) -> float:
        left = math.pow(1.0 - _progress(step, self.steps), self.power)
        return self.final + (self.initial - self.final) * left


@dataclass(frozen=True)
class Cosine:
    """Half a cosine wave from `initial` down to `final`."""

    initial: float
    final: float
    steps: int

    def lr(self, step: float) -> float:
        wave = (1.0 + math.cos(math.pi * _progress(step, self.steps))) / 2.0
        return self.final + (self.initial - self.final) * wave


@dataclass(frozen=True)
class ArcCotangent:
    """Near `initial` long before the step `half`, half of it at `half`, near 0 long after.

    `steepness` (k, per step) scales the distance from `half`.
    """

    initial: float
    half: float
    steepness: float

    def lr(self, step: float) -> float:
        # atan2(1, x) is arccot x in (0, pi); pi/2 - atan x would lose its digits far out.
        return self.initial / math.pi * math.atan2(1.0, self.steepness * (step - self.half))


@dataclass(frozen=True)
class Warmup:
    """`steps` steps that rise from `start_lr` (linear) or stay there (constant), then `after`.

    `after` gets the step t - `origin`. `origin` is `steps` for decays, which begin when the
    warm-up ends, and 0 for schedules whose epochs count from the start of training.
    """

    start_lr: float
    target_lr: float
    steps: int
    shape: Literal["linear", "constant"]
    after: Schedule
    origin: int

    def lr(self, step: float) -> float:
        if step >= self.steps:
            return self.after.lr(step - self.origin)
        if self.shape == "constant":
            return self.start_lr
        return self.start_lr + (self.target_lr - self.start_lr) * step / self.steps


@dataclass(frozen=True)
class RelativeSchedule:
    """Rates relative to the peak: from 0 to 1 in the first `warmup` of the training, then to 0.

    `warmup` is a fraction. The shape `constant`, for schedule-free optimizers, stays at 1. A
    step takes the value in the middle of its span, so that the rates of a schedule compressed into
    few steps have the same mean as those of the long one, and none is zero. The values are those
    of `Warmup` with `Polynomial` or `Cosine`, but for rounding.
    """

    shape: Literal["linear", "cosine", "constant"]
    warmup: float

    def at(self, done: float) -> float:
        """Return the rate relative to the peak after the fraction `done` of the training."""
        if done < self.warmup:
            return done / self.warmup
        if self.shape == "constant":
            return 1.0
        left = (1 - done) / (1 - self.warmup)
        return left if self.shape == "linear" else (1 - math.cos(math.pi * left)) / 2

    @property
    def mean(self) -> float:
        """The mean rate relative to the peak."""
        after = 1.0 if self.shape == "constant" else 0.5
        return self.warmup / 2 + after * (1 - self.warmup)

    def compressed(self, steps: int) -> tuple[float, ...]:
        """Return the schedule compressed into `steps` steps."""
        return tuple(self.at((i + 0.5) / steps) for i in range(steps))

    def of_epoch(self, span: EpochSpan) -> tuple[float, ...]:
        """Return the steps of an epoch that covers this part of the training."""
        return tuple(map(self.at, span.fractions()))


def _progress(step: float, steps: int) -> float:
    """Return the completed fraction of a decay, 0 to 1; a decay without steps is complete."""
    return 1.0 if step >= steps else step / steps


def build_schedule(policy: SchedulePolicy, steps: int, *, steps_per_epoch: int) -> Schedule:
    """Build the schedule of a training of this many updates.

    A decay (linear, polynomial, cosine) covers the steps after the warm-up. Drops (multistep)
    and the half of arc_cotangent count epochs from the start of training, warm-up
    included. arc_cotangent is slightly below `initial` when the warm-up ends.
    Raises JobError for a warm-up of more steps than the training has.
    """
    warmup = policy.warmup
    warmup_steps = warmup.length(steps_per_epoch)
    if warmup_steps > steps:
        unit = "epochs" if warmup.steps is None else "steps"
        rule = f"is longer than the training, which has {steps} updates"
        raise JobError([Problem(f"learning_rate.warmup.{unit}", rule, str(getattr(warmup, unit)))])
    after = _after_warmup(policy, warmup_steps, steps - warmup_steps, steps_per_epoch)
    if warmup_steps == 0:
        return after
    counts_from_start = policy.shape in ("multistep", "arc_cotangent")
    return Warmup(
        start_lr=warmup.start_lr(policy.initial),
        target_lr=policy.initial,
        steps=warmup_steps,
        shape=warmup.shape,
        after=after,
        origin=0 if counts_from_start else warmup_steps,
    )


def _after_warmup(
    policy: SchedulePolicy, warmup_steps: int, decay_steps: int, steps_per_epoch: int
) -> Schedule:
    match policy.shape:
        case "constant" | "plateau":
            return Constant(policy.initial)
        case "multistep":
            milestones = tuple(epoch * steps_per_epoch for epoch in policy.milestones)
            return MultiStep(policy.initial, policy.gamma, milestones)
        case "linear":
            return Polynomial(policy.initial, policy.final, decay_steps)
        case "polynomial":
            return Polynomial(policy.initial, policy.final, decay_steps, policy.power)
        case "cosine":
            return Cosine(policy.initial, policy.final, decay_steps)
        case "arc_cotangent":
            half = warmup_steps + decay_steps / 2
            if policy.half_epoch is not None:
                half = policy.half_epoch * steps_per_epoch
            return ArcCotangent(policy.initial, half, policy.steepness / steps_per_epoch)


ScalingRule = Literal["linear", "sqrt", "none"]


def scale_lr(rule: ScalingRule, lr: float, from_batch_size: int, to_batch_size: int) -> float:
    """Scale `lr` from one batch size to another."""
    ratio = to_batch_size / from_batch_size
    return lr * {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[rule]
