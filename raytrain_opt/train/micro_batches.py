"""Which micro-batches of a global batch are computed, how workers share them, and step timers.

A worker of speed v_w computes a fraction v_w / sum(v) of them, so that all finish at the same
time. Sums do not depend on the shares (`train.tree_sum`). The speeds are measured while training:
from the end of an update to the moment when a worker's last gradient is ready. Source: Chen, Wang
and others, Semi-Dynamic Load Balancing: Efficient Distributed Learning in Non-Dedicated
Environments, SoCC 2020, which shares samples rather than micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from raytrain_opt.clock import monotonic_s

# Of a step's time. A smaller gain is noise, and other shares cost the loaders a new start.
_WORTH = 0.05
# Weight of the latest measurement: a slow second must not change the shares of a minute.
_SMOOTHING = 0.5


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches, `indices` of `count`, of each global batch that are computed together."""

    indices: range
    count: int

    @classmethod
    def all(cls, count: int) -> MicroBatches:
        return cls(range(count), count)

    def refined(self, factor: int) -> MicroBatches:
        """Return the same samples in `factor` times as many micro-batches."""
        indices = range(self.indices.start * factor, self.indices.stop * factor)
        return MicroBatches(indices, self.count * factor)


def divide_by_speed(count: int, speeds: Sequence[float]) -> list[range]:
    """Return the micro-batches of each worker, one or more, that let the last be done first."""
    shares, workers = [1] * len(speeds), range(len(speeds))
    for _ in range(count - len(speeds)):
        first_done = min(workers, key=lambda w: (shares[w] + 1) / speeds[w])
        shares[first_done] += 1
    ends = list(accumulate(shares))
    return [range(end - share, end) for end, share in zip(ends, shares, strict=True)]


def step_time(shares: Sequence[range], speeds: Sequence[float]) -> float:
    """Return the time until the last worker is done, relative to exact shares."""
    longest = max(len(share) / speed for share, speed in zip(shares, speeds, strict=True))
    return longest * sum(speeds) / sum(map(len, shares))


class LoadBalance:
    """The micro-batches of each rank. All ranks make the same calls."""

    def __init__(self, device: torch.device, *, equal: bool) -> None:
        """`equal`: keep equal shares, whatever the speeds."""
        self._device, self._equal = device, equal or dist.get_world_size() == 1
        self._timer = step_timer_for(device)
        self.speeds: Sequence[float] = [1.0] * dist.get_world_size()
        self._measured = False
        self.shares: list[range] = []

    def share(self, count: int) -> None:
        """Share `count` micro-batches; keep the present shares unless others save time."""
        best = divide_by_speed(count, self.speeds)
        if sum(map(len, self.shares)) == count:
            gain = 1 - step_time(best, self.speeds) / step_time(self.shares, self.speeds)
            if gain <= _WORTH:
                return
        self.shares = best

    def begin_measurement(self) -> None:
        self._updates = self._computed = 0
        self._timer.begin()

    def on_gradients(self) -> None:
        """Call this when all gradients of an update are computed, before they are received."""
        self._timer.mark()

    def after_update(self) -> None:
        """Call this after each update."""
        self._updates += 1
        self._computed += len(self.shares[dist.get_rank()])
        self._timer.mark()
        if self._updates == 1:  # it waited for loaders to start, kernels to be chosen, compiling
            self._computed = 0
            self._timer.begin()

    def end_measurement(self) -> None:
        """Exchange what the ranks have measured, if they made several updates."""
        if self._equal or not self._computed:
            return
        # Intervals alternate between computing and the wait for others, with the update.
        seconds = torch.zeros(len(self.speeds), dtype=torch.float64, device=self._device)
        seconds[dist.get_rank()] = sum(self._timer.intervals_s()[::2]) / self._computed
        dist.all_reduce(seconds)
        weight = _SMOOTHING if self._measured else 1.0
        pairs = zip(self.speeds, seconds.tolist(), strict=True)
        self.speeds = [(1 - weight) * old + weight / latest for old, latest in pairs]
        self._measured = True


# The parts of one step, in order; the first begins at the end of the step before.
STEP_PARTS = ("data_wait_s", "copy_s", "forward_s", "backward_s", "update_s")


class StepTimer:
    """Time marks in a training loop, by the clock of the CPU.

    On a GPU, events of its stream, and nothing waits for a mark: the interval before a batch is
    copied is the time in which the device was idle.
    """

    def __init__(self) -> None:
        self._marks_s: list[float] = []

    def mark(self) -> None:
        """Mark the present time; on a GPU, the time when the work queued so far is done."""
        self._marks_s.append(monotonic_s())

    def begin(self) -> None:
        """Drop all marks, and mark the present time."""
        self._marks_s.clear()
        self.mark()

    def intervals_s(self) -> list[float]:
        """Return the seconds between consecutive marks. Waits for the device."""
        return [end - start for start, end in pairwise(self._marks_s)]


def step_timer_for(device: torch.device) -> StepTimer:
    return _CudaTimer(device) if device.type == "cuda" else StepTimer()


class _CudaTimer(StepTimer):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._intervals_s: list[float] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        self._events.clear()
        self._intervals_s.clear()
        self.mark()

    def intervals_s(self) -> list[float]:
        torch.cuda.synchronize(self._device)
        self._intervals_s += [a.elapsed_time(b) / 1000 for a, b in pairwise(self._events)]
        del self._events[:-1]  # each is read once
        return list(self._intervals_s)
