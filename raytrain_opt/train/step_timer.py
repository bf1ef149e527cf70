"""Timers for the parts of a training step: CPU time stamps, or events on a CUDA stream.

On a GPU nothing waits for a mark: the interval between two marks is the device's own time, so
the interval before a batch is copied is the time in which the device was idle.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from raytrain_opt.clock import monotonic_s

# The parts of one step, in order; the first begins at the end of the step before.
STEP_PARTS = ("data_wait_s", "copy_s", "forward_s", "backward_s", "update_s")


class StepTimer:
    """Time marks in a training loop, by the clock of the CPU."""

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
