"""Marks between the parts of a training step: host time, or events on a CUDA stream.

On a GPU nothing waits for a mark: the time between two is the device's own, so the gap
before a batch is copied is the time in which the device had nothing to do.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol

import torch

from raytrain_opt.clock import monotonic_s

# Of one step, in this order, from the end of the step before.
PARTS = ("data_wait_s", "copy_s", "forward_s", "backward_s", "update_s")


class Marks(Protocol):
    """Points in time of one training loop."""

    def set(self) -> None:
        """Now (on a GPU: when the work issued so far is done)."""
        ...

    def clear(self) -> None:
        """Forget all."""
        ...

    def gaps_s(self) -> list[float]:
        """Seconds between each mark and the next. Waits for the device."""
        ...


def marks_for(device: torch.device) -> Marks:
    """Those that fit the device."""
    return _DeviceMarks(device) if device.type == "cuda" else _HostMarks()


class _HostMarks:
    def __init__(self) -> None:
        self._at_s: list[float] = []

    def set(self) -> None:
        self._at_s.append(monotonic_s())

    def clear(self) -> None:
        self._at_s.clear()

    def gaps_s(self) -> list[float]:
        return [end - start for start, end in pairwise(self._at_s)]


class _DeviceMarks:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._known_s: list[float] = []

    def set(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def clear(self) -> None:
        torch.cuda.synchronize(self._device)
        self._events.clear()
        self._known_s.clear()

    def gaps_s(self) -> list[float]:
        """Read events are let go, all but the last."""
        torch.cuda.synchronize(self._device)
        self._known_s += [a.elapsed_time(b) / 1000 for a, b in pairwise(self._events)]
        del self._events[:-1]
        return list(self._known_s)
