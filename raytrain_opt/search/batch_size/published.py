"""GpuUsageMaximize and EpochTimeMinimize: batch-size strategies as published.

Source: Serizawa and Tatebe (University of Tsukuba), automatic optimization of the mini-batch
size for training speed, listings 2 and 3 with the errata.

The step that the paper calls calc_positive_update_diff() grows by one, to 10 at most (2 at first);
the step of calc_negative_update_diff() is half at the first shrinking loop, then grows so, too.

Where the paper is silent:
- Loops count from 0, as in its listings: with tests at loops 5, 10, 15, ... the size is then
  96 at loop 10 and 196 at loop 20 from 32, and 72 at loop 10 from 8, as in its tables. The test
  at loop 5 only records its value. The size at the converging test is chosen.
- A size that does not fit into memory ends the search with the largest measured size that fits
  (a step is 10 at most, so little is lost). A step beyond the bound, or below 1, ends it too.
- An initial size that does not fit is halved until one fits; loops count from there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from raytrain_opt.config.batch_size import EpochTimeMinimizeSearch, GpuUsageMaximizeSearch
from raytrain_opt.errors import ResourcesError
from raytrain_opt.results import Probe
from raytrain_opt.search.batch_size.strategy import BatchSizeChoice, ProbeRequest, SizeBounds

_MAX_STEP = 10


class _Published(ABC):
    """What both strategies share: the memory limits, and a test of convergence every few loops."""

    section: GpuUsageMaximizeSearch | EpochTimeMinimizeSearch
    bounds: SizeBounds
    weighs_checks = False  # loops are counted
    threshold: float  # converged when the measure changed by at most this since the last test

    def propose(self, history: Sequence[Probe]) -> ProbeRequest | BatchSizeChoice:
        """Propose or choose a size. Raises ResourcesError: nothing fits, or no utilization."""
        if request := self.bounds.request_first_fit(history, self.section.initial):
            return request
        loops, largest = self.bounds.fitting(history), self.bounds.largest_open(history)
        size, last = loops[-1].batch_size, history[-1].batch_size
        if last > largest:
            reason = f"the largest measured size that fits: {last} does not"
            return BatchSizeChoice(max(loop.batch_size for loop in loops), reason)
        loop, every = len(loops) - 1, self.section.test_every
        if loop % every == 0 and loop >= 2 * every:
            change = abs(self._measure(loops) - self._measure(loops[:-every]))
            if change <= self.threshold:
                reason = f"converged, {change:.2g} from the last test: {self._summary(loops)}"
                return BatchSizeChoice(size, reason)
        if len(history) >= self.section.max_loops:
            return BatchSizeChoice(size, f"stopped after max_loops = {self.section.max_loops}")
        following = min(max(1, size + self._step(loops)), largest)
        if following == size:
            return BatchSizeChoice(size, f"the size is at its bound: {self._summary(loops)}")
        return ProbeRequest(following, self._summary(loops))

    @abstractmethod
    def _measure(self, loops: Sequence[Probe]) -> float:
        """Return what converges."""

    @abstractmethod
    def _step(self, loops: Sequence[Probe]) -> int:
        """Return the next change of the size."""

    @abstractmethod
    def _summary(self, loops: Sequence[Probe]) -> str:
        """Describe the last loop."""


@dataclass(frozen=True)
class GpuUsageMaximize(_Published):
    """Grows while the device's utilization is below the target, and shrinks while it is not."""

    section: GpuUsageMaximizeSearch
    bounds: SizeBounds
    threshold = 5

    def _measure(self, loops: Sequence[Probe]) -> float:
        return loops[-1].batch_size

    def _step(self, loops: Sequence[Probe]) -> int:
        step, growing = 1, True
        for loop in loops:
            grows = self._is_below_target(loop)
            step = max(1, step // 2) if growing and not grows else min(step + 1, _MAX_STEP)
            growing = grows
        return step if growing else -step

    def _summary(self, loops: Sequence[Probe]) -> str:
        side = "below" if self._is_below_target(loops[-1]) else "not below"
        target = self.section.target_pct
        return f"utilization {loops[-1].utilization_pct:.1f} %, {side} {target:g} %"

    def _is_below_target(self, loop: Probe) -> bool:
        if math.isnan(loop.utilization_pct):
            raise ResourcesError(
                f"gpu_usage_maximize: the probe of batch size {loop.batch_size} took no sample "
                "of the device's utilization, which this strategy needs. Set a shorter "
                "batch_size_search.utilization_period_s or a longer max_probe_s, or choose the "
                "strategy throughput_knee."
            )
        return loop.utilization_pct < self.section.target_pct


@dataclass(frozen=True)
class EpochTimeMinimize(_Published):
    """Grows while epochs get shorter than at the initial size."""

    section: EpochTimeMinimizeSearch
    bounds: SizeBounds
    threshold = 0.05

    def _measure(self, loops: Sequence[Probe]) -> float:
        """Return 1 - time of an epoch / time of an epoch at the first loop."""
        return 1 - loops[0].samples_per_s / loops[-1].samples_per_s

    def _step(self, loops: Sequence[Probe]) -> int:
        return min(1 + len(loops), _MAX_STEP)

    def _summary(self, loops: Sequence[Probe]) -> str:
        epoch_s = self.bounds.epoch_samples / loops[-1].samples_per_s
        ratio, first = self._measure(loops), loops[0].batch_size
        return f"an epoch takes {epoch_s:.4g} s, {100 * ratio:.1f} % less than at {first}"
