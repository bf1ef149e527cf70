"""Learning rates written down beforehand, as pure functions of the step.

    t        step: optimizer updates done, counted from 0
    T        steps of the decay; at t = T, the end of the last step, the rate is `final`
    w        steps of the warm-up
    a, b     initial and final rate        g    gamma, factor at each drop

    Constant      a
    Step          a g^floor(t / every)
    MultiStep     a g^(milestones <= t)
    Linear        a + (b - a) t/T
    Polynomial    b + (a - b) (1 - t/T)^power
    Cosine        b + (a - b) (1 + cos(pi t/T)) / 2
    Warmup        t < w: linear   lr + (a - lr) t/w, or constant   lr;  afterwards its schedule

Beyond T the decays stay at `final`. All are frozen, picklable and free of torch. Sources:
gradual warm-up, Goyal et al. 2017; cosine, Loshchilov and Hutter, ICLR 2017.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal, Protocol

from raytrain_opt.config.learning_rate import SchedulePolicy
from raytrain_opt.config.learning_rate import Warmup as WarmupSection


class Schedule(Protocol):
    """Anything that knows the learning rate of an optimizer update."""

    def lr(self, step: int) -> float:
        """The rate of update number `step`, counted from 0."""
        ...


@dataclass(frozen=True)
class Constant:
    """The same rate always."""

    initial: float

    def lr(self, step: int) -> float:
        return self.initial


@dataclass(frozen=True)
class Step:
    """Multiplied by `gamma` after every `every` steps."""

    initial: float
    gamma: float
    every: int

    def lr(self, step: int) -> float:
        drops = step // self.every
        return self.initial * math.pow(self.gamma, drops)


@dataclass(frozen=True)
class MultiStep:
    """Multiplied by `gamma` at each milestone, steps in rising order."""

    initial: float
    gamma: float
    milestones: tuple[int, ...]

    def lr(self, step: int) -> float:
        drops = bisect_right(self.milestones, step)
        return self.initial * math.pow(self.gamma, drops)


@dataclass(frozen=True)
class Linear:
    """A straight line from `initial` to `final`."""

    initial: float
    final: float
    steps: int

    def lr(self, step: int) -> float:
        return self.initial + (self.final - self.initial) * _progress(step, self.steps)


@dataclass(frozen=True)
class Polynomial:
    """Steep at first and flat at the end, for `power` above 1."""

    initial: float
    final: float
    steps: int
    power: float

    def lr(self, step: int) -> float:
        left = math.pow(1.0 - _progress(step, self.steps), self.power)
        return self.final + (self.initial - self.final) * left


@dataclass(frozen=True)
class Cosine:
    """Half a cosine wave from `initial` down to `final`."""

    initial: float
    final: float
    steps: int

    def lr(self, step: int) -> float:
        wave = (1.0 + math.cos(math.pi * _progress(step, self.steps))) / 2.0
        return self.final + (self.initial - self.final) * wave


@dataclass(frozen=True)
class Warmup:
    """`steps` steps from `start_lr` to (linear) or at (constant) it, then `after`.

    `after` is asked for its step t - `origin`: `steps` for decays, which begin when the
    warm-up ends; 0 for drops whose epochs count from the start of training.
    """

    start_lr: float
    target_lr: float
    steps: int
    shape: Literal["linear", "constant"]
    after: Schedule
    origin: int

    def lr(self, step: int) -> float:
        if step >= self.steps:
            return self.after.lr(step - self.origin)
        if self.shape == "constant":
            return self.start_lr
        return self.start_lr + (self.target_lr - self.start_lr) * step / self.steps


def _progress(step: int, steps: int) -> float:
    """Share of a decay that is done, 0 to 1; a decay without steps is done."""
    return 1.0 if step >= steps else step / steps


def build_schedule(policy: SchedulePolicy, *, epochs: int, steps_per_epoch: int) -> Schedule:
    """The schedule of a whole training of `epochs` x `steps_per_epoch` updates.

    A decay (linear, polynomial, cosine) runs over the steps that the warm-up leaves. Drops
    (step, multistep) count epochs from the start of training, warm-up included.
    """
    warmup_steps = policy.warmup.epochs * steps_per_epoch
    decay_steps = epochs * steps_per_epoch - warmup_steps
    after = _after_warmup(policy, decay_steps, steps_per_epoch)
    if warmup_steps == 0:
        return after
    counts_from_start = policy.shape in ("step", "multistep")
    return Warmup(
        start_lr=policy.warmup.start_lr(policy.initial),
        target_lr=policy.initial,
        steps=warmup_steps,
        shape=policy.warmup.shape,
        after=after,
        origin=0 if counts_from_start else warmup_steps,
    )


def _after_warmup(policy: SchedulePolicy, steps: int, steps_per_epoch: int) -> Schedule:
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


def warmup_lrs(warmup: WarmupSection, target_lr: float, steps_per_epoch: int) -> tuple[float, ...]:
    """The rate of each step of a warm-up alone; empty if it has no epochs.

    Linear: from its starting rate towards `target_lr`, which the step after the last would have.
    """
    steps = warmup.epochs * steps_per_epoch
    climb = Warmup(
        warmup.start_lr(target_lr), target_lr, steps, warmup.shape, Constant(target_lr), steps
    )
    return tuple(climb.lr(step) for step in range(steps))
