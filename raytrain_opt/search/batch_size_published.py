"""GpuUsageMaximize and EpochTimeMinimize: batch-size strategies as published.

Source: Serizawa and Tatebe (University of Tsukuba), automatic optimisation of the mini-batch
size for training speed, listings 2 and 3 with the errata.

| paper                        | here                                                |
|------------------------------|-----------------------------------------------------|
| iteration_count              | `loop`: 0 for the first probe, then the changes of size so far |
| norm                         | `section.converged_within`                          |
| max_iteration                | `section.max_loops`                                 |
| calc_positive_update_diff()  | `_longer`: one more, 10 at most (2 for the first)   |
| calc_negative_update_diff()  | `_shorter`: half, at least 1, where growth turns; then `_longer` |

Where the paper is silent:
- Loops count from 0, like its listings: with the tests at loops 5, 10, 15, ... the size is then
  96 at loop 10 and 196 at loop 20 from 32, and 72 at loop 10 from 8, as its tables say. The test
  at loop 5 finds no previous test and only notes its value, so the first stop is at loop 10,
  the earliest in its tables. The size at the converging test is chosen.
- Memory or the largest allowed size bound the search from above. A size that does not fit ends
  it with the largest measured one that does (a step is 10 at most, so little is lost);
  so does wanting to grow at the bound, or to shrink below 1.
- A start that does not fit is halved until one does; the loops count from there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from raytrain_opt.config.batch_size import EpochTimeMinimizeSearch, GpuUsageMaximizeSearch
from raytrain_opt.errors import ResourcesError
from raytrain_opt.search.batch_size import Ask, Choice, Limits, Measurement
from raytrain_opt.search.memory_bound import ask_for_first_fit, fitting, largest_open

_LONGEST_STEP = 10


@dataclass(frozen=True)
class GpuUsageMaximize:
    """Grow while the device's utilisation is below the target, shrink while it is not."""

    section: GpuUsageMaximizeSearch
    limits: Limits

    def propose(self, history: Sequence[Measurement]) -> Ask | Choice:
        """The next size, or the one at which sizes moved by `converged_within` or less.

        Raises ResourcesError when size 1 does not fit or a probe has no utilisation.
        """
        ask = ask_for_first_fit(history, self.limits, self.section.start)
        return ask or _bounded(history, self.limits) or self._in_loop(history)

    def _in_loop(self, history: Sequence[Measurement]) -> Ask | Choice:
        loops = fitting(history, self.limits)
        now = loops[-1]
        previous = _previous_test(len(loops) - 1, self.section.test_every)
        if previous is not None:
            moved = abs(now.batch_size - loops[previous].batch_size)
            if moved <= self.section.converged_within:
                return Choice(now.batch_size, f"converged: moved by {moved} since the last test")
        if len(history) >= self.section.max_loops:
            return Choice(now.batch_size, f"stopped after max_loops = {self.section.max_loops}")
        return self._next(now, self._change(loops), largest_open(history, self.limits))

    def _next(self, now: Measurement, change: int, largest: int) -> Ask | Choice:
        size = min(max(1, now.batch_size + change), largest)
        side = "below" if change > 0 else "not below"
        seen = f"utilisation {now.utilization_pct:.1f} %, {side} {self.section.target_pct:g} %"
        if size == now.batch_size:
            return Choice(size, f"{seen}, but the size is at its bound")
        return Ask(size, seen)

    def _change(self, loops: Sequence[Measurement]) -> int:
        """By how much the size changes after the last of `loops`, negative to shrink."""
        step, growing = 1, True
        for loop in loops:
            grows = self._is_below_target(loop)
            step = _shorter(step) if growing and not grows else _longer(step)
            growing = grows
        return step if growing else -step

    def _is_below_target(self, loop: Measurement) -> bool:
        if math.isnan(loop.utilization_pct):
            raise ResourcesError(
                f"gpu_usage_maximize: the probe of batch size {loop.batch_size} took no sample "
                "of the device's utilisation, which this strategy needs. Set a shorter "
                "batch_size_search.utilization.period_s or a longer max_seconds, another "
                "utilization.sampler, or choose the strategy throughput_knee."
            )
        return loop.utilization_pct < self.section.target_pct


@dataclass(frozen=True)
class EpochTimeMinimize:
    """Grow while an epoch gets faster than at the start."""

    section: EpochTimeMinimizeSearch
    limits: Limits

    def propose(self, history: Sequence[Measurement]) -> Ask | Choice:
        """The next size, or the one at which the improvement moved little since the last test.

        Raises ResourcesError when size 1 does not fit.
        """
        ask = ask_for_first_fit(history, self.limits, self.section.start)
        return ask or _bounded(history, self.limits) or self._in_loop(history)

    def _in_loop(self, history: Sequence[Measurement]) -> Ask | Choice:
        loops = fitting(history, self.limits)
        now, ratio = loops[-1], self._improvement(loops, len(loops) - 1)
        seconds = self._epoch_s(now)
        seen = f"an epoch takes {seconds:.4g} s, {ratio:.1%} less than at {loops[0].batch_size}"
        previous = _previous_test(len(loops) - 1, self.section.test_every)
        if previous is not None:
            moved = abs(ratio - self._improvement(loops, previous))
            if moved <= self.section.converged_within:
                return Choice(now.batch_size, f"converged: {seen}, {moved:.1%} from the last test")
        if len(history) >= self.section.max_loops:
            reason = f"stopped after max_loops = {self.section.max_loops}: {seen}"
            return Choice(now.batch_size, reason)
        return self._next(len(loops), now.batch_size, largest_open(history, self.limits), seen)

    def _next(self, loops: int, size: int, largest: int, seen: str) -> Ask | Choice:
        if size >= largest:
            return Choice(size, f"the largest size allowed: {seen}")
        return Ask(min(size + min(1 + loops, _LONGEST_STEP), largest), seen)

    def _improvement(self, loops: Sequence[Measurement], loop: int) -> float:
        """1 - time of an epoch / the same at the first loop."""
        return 1 - self._epoch_s(loops[loop]) / self._epoch_s(loops[0])

    def _epoch_s(self, loop: Measurement) -> float:
        return self.limits.epoch_samples / loop.samples_per_s


def _bounded(history: Sequence[Measurement], limits: Limits) -> Choice | None:
    """The largest size measured to fit, once a size after it ran out of memory."""
    if history[-1].fits:
        return None
    size = max(m.batch_size for m in fitting(history, limits))
    return Choice(size, f"the largest measured that fits: {history[-1].batch_size} does not")


def _previous_test(loop: int, every: int) -> int | None:
    """The loop to compare `loop` with; None where nothing is tested or nothing came before."""
    return loop - every if loop % every == 0 and loop >= 2 * every else None


def _longer(step: int) -> int:
    return min(step + 1, _LONGEST_STEP)


def _shorter(step: int) -> int:
    return max(1, step // 2)
