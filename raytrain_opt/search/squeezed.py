"""A warm-up and decay to zero as a function of the share of a training that is done, so that it
can be squeezed into any number of steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from raytrain_opt.optim.batch_ramp import EpochSteps


@dataclass(frozen=True)
class WholeSchedule:
    """Shares of the peak rate: 0 to 1 in the first `warmup` of the training, then back to 0.

    A step takes the value in the middle of its span. So the rates of a schedule squeezed into
    few steps have the same mean as those of the long one, and none is zero.
    """

    shape: Literal["linear", "cosine"]
    warmup: float

    def at(self, done: float) -> float:
        """Share of the peak when `done` (0 to 1) of the training is done."""
        if done < self.warmup:
            return done / self.warmup
        left = (1 - done) / (1 - self.warmup)
        return left if self.shape == "linear" else (1 - math.cos(math.pi * left)) / 2

    def squeezed(self, steps: int, done: float = 0.0) -> tuple[float, ...]:
        """What is left of the schedule after `done`, in `steps` steps."""
        return tuple(self.at(done + (1 - done) * (i + 0.5) / steps) for i in range(steps))

    def of_epoch(self, epoch: int, epochs: int, steps: EpochSteps) -> tuple[float, ...]:
        """The steps of `epoch` (from 1) of a training of `epochs`: each epoch is as much of it,
        however many steps it has.
        """
        count = steps(epoch)
        return tuple(self.at((epoch - 1 + (i + 0.5) / count) / epochs) for i in range(count))
