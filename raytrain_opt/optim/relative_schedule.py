"""A warm-up, and decay to zero or a constant rate, for any number of steps.

The values are those of `Warmup` with `Linear` or `Cosine` of `schedules`, but not bit for bit:
the formulas here are kept so that seeded runs do not change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from raytrain_opt.optim.epoch_steps import EpochSpan


@dataclass(frozen=True)
class RelativeSchedule:
    """Rates relative to the peak: from 0 to 1 in the first `warmup` of the training, then to 0.

    `warmup` is a fraction. The shape `constant`, that of schedule-free optimizers, stays at 1. A
    step takes the value in the middle of its span, so that the rates of a schedule compressed into
    few steps have the same mean as those of the long one, and none is zero.
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
