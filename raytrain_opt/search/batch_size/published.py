"""GpuUsageMaximize and EpochTimeMinimize: batch-size strategies as published.

Source: Serizawa and Tatebe (University of Tsukuba), automatic optimization of the mini-batch
size for training speed, listings 2 and 3 with the errata.

| paper                        | here                                                |
|------------------------------|-----------------------------------------------------|
| iteration_count              | `loop`: 0 for the first probe, then the changes of size so far |
| norm                         | `section.converged_samples`                          |
| max_iteration                | `section.max_loops`                                 |
| calc_positive_update_diff()  | `_increase`: one more, 10 at most (2 for the first) |
| calc_negative_update_diff()  | `_halve` at the first shrinking step, then `_increase` |

Where the paper is silent:
- Loops count from 0, as in its listings: with tests at loops 5, 10, 15, ... the size is then
  96 at loop 10 and 196 at loop 20 from 32, and 72 at loop 10 from 8, as in its tables. The test
  at loop 5 has no previous test and only records its value, so the search stops at loop 10 at
  the earliest, as in its tables. The size at the converging test is chosen.
- Memory or the largest allowed size bound the search from above. A size that does not fit ends
  the search with the largest measured size that fits (a step is 10 at most, so little is lost).
  A step beyond the bound, or below 1, ends it too.
- An initial size that does not fit is halved until one fits; loops count from there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from raytrain_opt.config.batch_size import EpochTimeMinimizeSearch, GpuUsageMaximizeSearch
from raytrain_opt.errors import ResourcesError
from raytrain_opt.search.batch_size.memory_bound import (
    fitting,
    largest_open,
    request_first_fit,
)
from raytrain_opt.search.batch_size.strategy import (
    BatchSizeChoice,
    Measurement,
    ProbeRequest,
    SizeBounds,
)

_MAX_STEP = 10


@dataclass(frozen=True)
class GpuUsageMaximize:
    """Grows while the device's utilization is below the target, and shrinks while it is not."""

    section: GpuUsageMaximizeSearch
    bounds: SizeBounds

    def propose(self, history: Sequence[Measurement]) -> ProbeRequest | BatchSizeChoice:
        """Propose the next size, or choose one if it changed little since the last test.

        Raises ResourcesError if size 1 does not fit or a probe has no utilization.
        """
        request = request_first_fit(history, self.bounds, self.section.initial)
        return request or _stop_at_memory_limit(history, self.bounds) or self._in_loop(history)

    def _in_loop(self, history: Sequence[Measurement]) -> ProbeRequest | BatchSizeChoice:
        loops = fitting(history, self.bounds)
        last = loops[-1]
        previous = _previous_test(len(loops) - 1, self.section.test_every)
        if previous is not None:
            change = abs(last.batch_size - loops[previous].batch_size)
            if change <= self.section.converged_samples:
                return BatchSizeChoice(
                    last.batch_size, f"converged: changed by {change} since the last test"
                )
        if len(history) >= self.section.max_loops:
            return BatchSizeChoice(
                last.batch_size, f"stopped after max_loops = {self.section.max_loops}"
            )
        return self._next(last, self._step(loops), largest_open(history, self.bounds))

    def _next(self, last: Measurement, step: int, largest: int) -> ProbeRequest | BatchSizeChoice:
        size = min(max(1, last.batch_size + step), largest)
        side = "below" if step > 0 else "not below"
        reason = f"utilization {last.utilization_pct:.1f} %, {side} {self.section.target_pct:g} %"
        if size == last.batch_size:
            return BatchSizeChoice(size, f"{reason}, but the size is at its bound")
        return ProbeRequest(size, reason)

    def _step(self, loops: Sequence[Measurement]) -> int:
        """Return the change of the size after the last of `loops`; negative to shrink."""
        step, growing = 1, True
        for loop in loops:
            grows = self._is_below_target(loop)
            step = _halve(step) if growing and not grows else _increase(step)
            growing = grows
        return step if growing else -step

    def _is_below_target(self, loop: Measurement) -> bool:
        if math.isnan(loop.utilization_pct):
            raise ResourcesError(
                f"gpu_usage_maximize: the probe of batch size {loop.batch_size} took no sample "
                "of the device's utilization, which this strategy needs. Set a shorter "
                "batch_size_search.utilization.period_s or a longer max_probe_s, another "
                "utilization.sampler, or choose the strategy throughput_knee."
            )
        return loop.utilization_pct < self.section.target_pct


@dataclass(frozen=True)
class EpochTimeMinimize:
    """Grows while epochs get shorter than at the initial size."""

    section: EpochTimeMinimizeSearch
    bounds: SizeBounds

    def propose(self, history: Sequence[Measurement]) -> ProbeRequest | BatchSizeChoice:
        """Propose the next size, or choose one if the epoch time changed little since a test.

        Raises ResourcesError if size 1 does not fit.
        """
        request = request_first_fit(history, self.bounds, self.section.initial)
        return request or _stop_at_memory_limit(history, self.bounds) or self._in_loop(history)

    def _in_loop(self, history: Sequence[Measurement]) -> ProbeRequest | BatchSizeChoice:
        loops = fitting(history, self.bounds)
        last, ratio = loops[-1], self._improvement(loops, len(loops) - 1)
        epoch_s = self._epoch_s(last)
        summary = f"an epoch takes {epoch_s:.4g} s, {ratio:.1%} less than at {loops[0].batch_size}"
        previous = _previous_test(len(loops) - 1, self.section.test_every)
        if previous is not None:
            change = abs(ratio - self._improvement(loops, previous))
            if change <= self.section.converged_fraction:
                return BatchSizeChoice(
                    last.batch_size, f"converged: {summary}, {change:.1%} from the last test"
                )
        if len(history) >= self.section.max_loops:
            reason = f"stopped after max_loops = {self.section.max_loops}: {summary}"
            return BatchSizeChoice(last.batch_size, reason)
        return self._next(len(loops), last.batch_size, largest_open(history, self.bounds), summary)

    def _next(
        self, loops: int, size: int, largest: int, summary: str
    ) -> ProbeRequest | BatchSizeChoice:
        if size >= largest:
            return BatchSizeChoice(size, f"the largest size allowed: {summary}")
        return ProbeRequest(min(size + min(1 + loops, _MAX_STEP), largest), summary)

    def _improvement(self, loops: Sequence[Measurement], loop: int) -> float:
        """Return 1 - time of an epoch / time of an epoch at the first loop."""
        return 1 - self._epoch_s(loops[loop]) / self._epoch_s(loops[0])

    def _epoch_s(self, loop: Measurement) -> float:
        return self.bounds.epoch_samples / loop.samples_per_s


def _stop_at_memory_limit(
    history: Sequence[Measurement], bounds: SizeBounds
) -> BatchSizeChoice | None:
    """Choose the largest size that was measured to fit, once a larger one ran out of memory."""
    if history[-1].fits:
        return None
    size = max(m.batch_size for m in fitting(history, bounds))
    return BatchSizeChoice(
        size, f"the largest measured size that fits: {history[-1].batch_size} does not"
    )


def _previous_test(loop: int, every: int) -> int | None:
    """Return the loop that `loop` is compared with; None if it is no test or the first one."""
    return loop - every if loop % every == 0 and loop >= 2 * every else None


def _increase(step: int) -> int:
    return min(step + 1, _MAX_STEP)


def _halve(step: int) -> int:
    return max(1, step // 2)
