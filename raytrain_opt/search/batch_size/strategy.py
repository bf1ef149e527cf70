"""A strategy: probes in, a size to measure or the choice out; and limits of memory and updates.

Training needs updates: with too few of them no learning rate learns, however fast the samples
pass. So a size is allowed only if it leaves `min_updates_per_epoch` and `min_updates`; where a
job has fewer with its own size, that size is the largest. Nor may the rate grow with the size by
more than `LARGEST_LR_FACTOR`, unless the job names the largest size itself.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from raytrain_opt.config.batch_size import BatchSizeSection
from raytrain_opt.config.updates import RampStep
from raytrain_opt.errors import ResourcesError
from raytrain_opt.optim.epoch_steps import Length, epoch_steps, ramp_factor
from raytrain_opt.optim.schedules import ScalingRule
from raytrain_opt.results import Probe

# The linear rule holds for small factors: Goyal et al. needed a warm-up for 8 and more.
LARGEST_LR_FACTOR = 8


@dataclass(frozen=True)
class ProbeRequest:
    """The size to measure next, which may have been measured before."""

    batch_size: int
    reason: str


@dataclass(frozen=True)
class BatchSizeChoice:
    """The size to train with, which was measured and fits."""

    batch_size: int
    reason: str


@dataclass(frozen=True)
class SizeBounds:
    """The allowed batch sizes per worker, 1 to `largest`."""

    largest: int
    epoch_samples: int  # per worker
    always_allowed: int = 0  # up to the job's own size, a step may take longer than `max_step_s`
    max_step_s: float = math.inf  # of a training with a time limit: more would leave few updates

    def smallest_excluded(self, history: Sequence[Probe]) -> int | None:
        """Return the smallest measured size without enough memory or updates, or None."""
        excluded = (p.batch_size for p in history if not p.fits or self._is_too_slow(p))
        return min(excluded, default=None)

    def _is_too_slow(self, probe: Probe) -> bool:
        step_s = probe.batch_size / probe.samples_per_s
        return probe.batch_size > self.always_allowed and step_s > self.max_step_s

    def largest_open(self, history: Sequence[Probe]) -> int:
        """Return the largest size that is allowed and not ruled out; 0 if there is none."""
        excluded = self.smallest_excluded(history)
        return self.largest if excluded is None else min(self.largest, excluded - 1)

    def fitting(self, history: Sequence[Probe]) -> list[Probe]:
        """Return the probes that fit and that no later one ruled out, in their order."""
        largest = self.largest_open(history)
        return [probe for probe in history if probe.fits and probe.batch_size <= largest]

    def request_first_fit(self, history: Sequence[Probe], initial: int) -> ProbeRequest | None:
        """Request `initial`, then half of what did not fit, or raise ResourcesError at 1."""
        if self.fitting(history):
            return None
        if (excluded := self.smallest_excluded(history)) is None:
            return ProbeRequest(min(initial, self.largest), "initial size")
        if excluded == 1:
            raise ResourcesError(
                "batch_size_search: not even a batch of one sample per worker fits into memory; "
                f"out of memory: {', '.join(str(probe.batch_size) for probe in history)}. Use a "
                "smaller model or input, a lower precision, a device with more memory, or a "
                "smaller batch_size_search.memory_reserve."
            )
        return ProbeRequest(excluded // 2, f"half of {excluded}, which did not fit")


@dataclass(frozen=True)
class Updates:
    """Updates of the shortest epoch and of the training; infinite if the epochs are not known."""

    per_epoch: int
    total: float

    @classmethod
    def count(
        cls, train_size: int, batch_size: int, length: Length, ramp: Sequence[RampStep] = ()
    ) -> Updates:
        """Count the updates with this global batch size; none if it exceeds the training set."""
        if batch_size * ramp_factor(ramp, sys.maxsize) > train_size:
            return cls(0, 0)
        steps = epoch_steps(train_size, batch_size, ramp)
        return cls(steps(max(1, length.known_epochs)), length.total_steps(steps))

    def __str__(self) -> str:
        total = "" if math.isinf(self.total) else f", {self.total:,} in all"
        return f"{self.per_epoch:,} an epoch{total}"


def largest_size(
    section: BatchSizeSection,
    own: int,
    train_size: int,
    length: Length,
    workers: int = 1,
    ramp: Sequence[RampStep] = (),
    rule: ScalingRule = "none",
) -> int:
    """Return the largest allowed batch size per worker; `own`: of the job itself."""
    possible = train_size // (workers * ramp_factor(ramp, sys.maxsize))

    def leaves_too_few(size: int) -> bool:
        updates = Updates.count(train_size, size * workers, length, ramp)
        is_short = updates.total < section.min_updates
        return is_short or updates.per_epoch < section.min_updates_per_epoch

    enough = bisect_left(range(1, possible + 1), True, key=leaves_too_few)
    # A size of its own with which the job could not train is no reason for few updates.
    allowed = max(own if own <= possible else 1, enough)
    by_rate = {"linear": LARGEST_LR_FACTOR, "sqrt": LARGEST_LR_FACTOR**2, "none": allowed}
    return min(allowed, section.max_batch_size or by_rate[rule] * own)


class Strategy(Protocol):
    """Decides from probes. `weighs_checks`: the check of a choice is one more probe for it."""

    weighs_checks: bool

    def propose(self, history: Sequence[Probe]) -> ProbeRequest | BatchSizeChoice:
        """Propose the next step, given all probes in order. Raises ResourcesError if none fits."""
