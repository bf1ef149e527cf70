"""Learning-rate schedules, and rates for another batch size: pure functions.

Schedules are functions of the step, known before the training.

    t        step: optimizer updates done, counted from 0; may be fractional
    w, T     steps of the warm-up, and of the training
    x        (t - w) / (T - w), completed fraction of the decay; 1 from t = T on
    a, b     initial and final rate           g    gamma, factor of each drop
    e        step at which the rate is a/2    k    steepness, per step

    t < w           linear   s + (a - s) t/w, or constant   s;  s: starting rate of the warm-up
    constant        a
    multistep       a g^(milestones <= t)
    linear          b + (a - b) (1 - x)
    polynomial      b + (a - b) (1 - x)^power
    cosine          b + (a - b) (1 + cos(pi x)) / 2
    arc_cotangent   (a / pi) arccot(k (t - e)), arccot in (0, pi)

Milestones and e count from the start of training, warm-up included. The module is free of torch.
Sources: gradual warm-up, Goyal et al. 2017 (arXiv 1706.02677); cosine, Loshchilov and Hutter,
SGDR, ICLR 2017; arc-cotangent, Honda, Miwa, Yamazaki et al. 2019 (ResNet-50 in 74.7 s), whose
printed formula adds a/2 and so contradicts their text and figure: this one agrees with both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from raytrain_opt.config.learning_rate import SchedulePolicy, Warmup
from raytrain_opt.optim.epoch_steps import EpochSpan


def lr_at(policy: SchedulePolicy, step: float, *, steps: int, steps_per_epoch: int) -> float:
    """Return the rate of update number `step`, from 0, in a training of `steps` updates.

    Steps are fractional where a larger batch leaves fewer updates in an epoch. Shape plateau stays
    at `initial`: who knows the losses multiplies it.
    """
    initial, final = policy.initial, policy.final
    if step < (warmup := policy.warmup.length(steps_per_epoch)):
        return warmup_lr(policy.warmup, initial, step, warmup)
    since, decay = step - warmup, steps - warmup
    done = 1.0 if since >= decay else since / decay
    match policy.shape:
        case "constant" | "plateau":
            return initial
        case "multistep":
            drops = sum(epoch * steps_per_epoch <= step for epoch in policy.milestones)
            return initial * math.pow(policy.gamma, drops)
        case "linear":
            return final + (initial - final) * (1.0 - done)
        case "polynomial":
            return final + (initial - final) * math.pow(1.0 - done, policy.power)
        case "cosine":
            return final + (initial - final) * ((1.0 + math.cos(math.pi * done)) / 2.0)
        case "arc_cotangent":
            epoch = policy.half_epoch
            half = warmup + decay / 2 if epoch is None else epoch * steps_per_epoch
            steepness = policy.steepness / steps_per_epoch
            # atan2(1, x) is arccot x in (0, pi); pi/2 - atan x would lose its digits far out.
            return initial / math.pi * math.atan2(1.0, steepness * (step - half))


def warmup_lr(warmup: Warmup, initial: float, step: float, steps: int) -> float:
    """Return the rate of update number `step`, from 0, of a warm-up of `steps` to `initial`."""
    start = initial / 20 if warmup.lr is None else warmup.lr
    return start if warmup.shape == "constant" else start + (initial - start) * step / steps


@dataclass(frozen=True)
class RelativeSchedule:
    """Rates relative to the peak: they rise from 0 to 1 in the warm-up, then fall to 0.

    A step takes the value in the middle of its span, so that the rates of a schedule compressed
    into few steps have the same mean as those of the long one, and none is zero.
    """

    shape: Literal["linear", "cosine", "constant"]  # constant: stays at 1
    warmup: float  # fraction of the training

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
        length = span.stop - span.start
        middles = ((i + 0.5) / span.steps for i in range(span.steps))
        return tuple(self.at((span.start + length * middle) / span.total) for middle in middles)


ScalingRule = Literal["linear", "sqrt", "none"]


def scale_lr(rule: ScalingRule, lr: float, from_batch_size: int, to_batch_size: int) -> float:
    """Scale `lr` from one batch size to another, by a factor of r or its square root.

    linear: an update moves as far as r of the earlier ones (Goyal et al. 2017, arXiv 1706.02677);
    sqrt: its variance stays the same (Krizhevsky 2014, arXiv 1404.5997). Both hold up to a batch
    size that depends on model and data; for a large r, start with a warm-up.
    """
    ratio = to_batch_size / from_batch_size
    return lr * {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[rule]
