"""Learning rates written down beforehand, as pure functions of the step.

    t        step: optimizer updates done, counted from 0; may lie between two
    T        steps of the decay; at t = T, the end of the last step, the rate is `final`
    w        steps of the warm-up
    a, b     initial and final rate           g    gamma, factor at each drop
    e        step at which the rate is a/2    k    steepness, per step
    f        increasing through the origin; x itself unless given

    Constant      a
    Step          a g^floor(t / every)
    MultiStep     a g^(milestones <= t)
    Linear        a + (b - a) t/T
    Polynomial    b + (a - b) (1 - t/T)^power
    Cosine        b + (a - b) (1 + cos(pi t/T)) / 2
    ArcCotangent  (a / pi) arccot(f(k (t - e))), arccot in (0, pi)
    Warmup        t < w: linear   lr + (a - lr) t/w, or constant   lr;  afterwards its schedule

Beyond T the decays stay at `final`; the arc-cotangent has neither. All are frozen, picklable and
free of torch. Sources: gradual warm-up, Goyal et al. 2017; cosine, Loshchilov and Hutter, ICLR
2017; arc-cotangent, Honda, Miwa, Yamazaki et al. 2019 (ResNet-50 in 74.7 s), whose printed
formula adds a/2 and so contradicts their text and figure: this one agrees with both.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from raytrain_opt.config.learning_rate import SchedulePolicy
from raytrain_opt.config.learning_rate import Warmup as WarmupSection


class Schedule(Protocol):
    """Anything that knows the learning rate of an optimizer update."""

    def lr(self, step: float) -> float:
        """The rate of update number `step`, counted from 0.

        A step between two updates is asked for when a larger batch makes an epoch's updates
        fewer: they go through the same schedule in longer strides.
        """
        ...


@dataclass(frozen=True)
class Constant:
    """The same rate always."""

    initial: float

    def lr(self, step: float) -> float:
        return self.initial


@dataclass(frozen=True)
class Step:
    """Multiplied by `gamma` after every `every` steps."""

    initial: float
    gamma: float
    every: int

    def lr(self, step: float) -> float:
        drops = step // self.every
        return self.initial * math.pow(self.gamma, drops)


@dataclass(frozen=True)
class MultiStep:
    """Multiplied by `gamma` at each milestone, steps in rising order."""

    initial: float
    gamma: float
    milestones: tuple[int, ...]

    def lr(self, step: float) -> float:
        drops = bisect_right(self.milestones, step)
        return self.initial * math.pow(self.gamma, drops)


@dataclass(frozen=True)
class Linear:
    """A straight line from `initial` to `final`."""

    initial: float
    final: float
    steps: int

    def lr(self, step: float) -> float:
        return self.initial + (self.final - self.initial) * _progress(step, self.steps)


@dataclass(frozen=True)
class Polynomial:
    """Steep at first and flat at the end, for `power` above 1."""

    initial: float
    final: float
    steps: int
    power: float

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


def _same(x: float) -> float:
    return x


@dataclass(frozen=True)
class ArcCotangent:
    """Near `initial` long before the step `half`, half of it there, near 0 long after.

    `steepness` (k, per step) stretches the steps from `half` on which `f` acts. `f` increases
    through the origin; one of your own must be importable by name to be pickled.
    """

    initial: float
    half: float
    steepness: float
    f: Callable[[float], float] = _same

    def lr(self, step: float) -> float:
        # atan2(1, x) is arccot x in (0, pi); pi/2 - atan x would lose its digits far out.
        return (
            self.initial / math.pi * math.atan2(1.0, self.f(self.steepness * (step - self.half)))
        )


@dataclass(frozen=True)
class Warmup:
    """`steps` steps from `start_lr` to (linear) or at (constant) it, then `after`.

    `after` is asked for its step t - `origin`: `steps` for decays, which begin when the
    warm-up ends; 0 for those whose epochs count from the start of training.
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


def _progress(step: float, steps: int) -> float:
    """Share of a decay that is done, 0 to 1; a decay without steps is done."""
    return 1.0 if step >= steps else step / steps


def build_schedule(policy: SchedulePolicy, *, epochs: int, steps_per_epoch: int) -> Schedule:
    """The schedule of a whole training of `epochs` x `steps_per_epoch` updates.

    A decay (linear, polynomial, cosine) runs over the steps that the warm-up leaves. Drops
    (step, multistep) and the half of arc_cotangent count epochs from the start of training,
    warm-up included. Arc_cotangent is a little below `initial` when the warm-up hands over.
    """
    warmup_steps = policy.warmup.epochs * steps_per_epoch
    decay_steps = epochs * steps_per_epoch - warmup_steps
    after = _after_warmup(policy, warmup_steps, decay_steps, steps_per_epoch)
    if warmup_steps == 0:
        return after
    counts_from_start = policy.shape in ("step", "multistep", "arc_cotangent")
    return Warmup(
        start_lr=policy.warmup.start_lr(policy.initial),
        target_lr=policy.initial,
        steps=warmup_steps,
        shape=policy.warmup.shape,
        after=after,
        origin=0 if counts_from_start else warmup_steps,
    )


def _after_warmup(
    policy: SchedulePolicy, warmup_steps: int, steps: int, steps_per_epoch: int
) -> Schedule:
    match policy.shape:
        case "constant":
            return Constant(policy.initial)
        case "step":
            return Step(policy.initial, policy.gamma, policy.every_epochs * steps_per_epoch)
        case "multistep":
            milestones = tuple(epoch * steps_per_epoch for epoch in policy.milestones)
            return MultiStep(policy.initial, policy.gamma, milestones)
        case "linear":
            return Linear(policy.initial, policy.final, steps)
        case "polynomial":
            return Polynomial(policy.initial, policy.final, steps, policy.power)
        case "cosine":
            return Cosine(policy.initial, policy.final, steps)
        case "arc_cotangent":
            half = warmup_steps + steps / 2
            if policy.half_epoch is not None:
                half = policy.half_epoch * steps_per_epoch
            return ArcCotangent(policy.initial, half, policy.steepness / steps_per_epoch)


def warmup_lrs(warmup: WarmupSection, target_lr: float, steps_per_epoch: int) -> tuple[float, ...]:
    """The rate of each step of a warm-up alone; empty if it has no epochs.

    Linear: from its starting rate towards `target_lr`, which the step after the last would have.
    """
    steps = warmup.epochs * steps_per_epoch
    climb = Warmup(
        warmup.start_lr(target_lr), target_lr, steps, warmup.shape, Constant(target_lr), steps
    )
    return tuple(climb.lr(step) for step in range(steps))
