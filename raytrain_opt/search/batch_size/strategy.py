"""A strategy: probes in, a size to measure or the choice out; and limits of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from raytrain_opt.errors import ResourcesError
from raytrain_opt.results import Probe


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
    workers: int = 1  # the global batch is this times a size

    def largest_open(self, history: Sequence[Probe]) -> int:
        """Return the largest size that is allowed and not ruled out; 0 if there is none."""
        unfit = smallest_unfit(history)
        return self.largest if unfit is None else min(self.largest, unfit - 1)

    def fitting(self, history: Sequence[Probe]) -> list[Probe]:
        """Return the probes that fit and that no later one ruled out, in their order."""
        largest = self.largest_open(history)
        return [probe for probe in history if probe.fits and probe.batch_size <= largest]

    def request_first_fit(self, history: Sequence[Probe], initial: int) -> ProbeRequest | None:
        """Request `initial`, then half of what did not fit, or raise ResourcesError at 1."""
        if self.fitting(history):
            return None
        unfit = smallest_unfit(history)
        if unfit is None:
            return ProbeRequest(min(initial, self.largest), "initial size")
        if unfit == 1:
            raise ResourcesError(
                "batch_size_search: not even a batch of one sample per worker fits into memory; "
                f"out of memory: {', '.join(str(probe.batch_size) for probe in history)}. Use a "
                "smaller model or input, a lower precision, a device with more memory, or a "
                "smaller batch_size_search.memory_reserve."
            )
        return ProbeRequest(unfit // 2, f"half of {unfit}, which did not fit into memory")


def smallest_unfit(history: Sequence[Probe]) -> int | None:
    """Return the smallest size that ran out of memory, or None."""
    return min((probe.batch_size for probe in history if not probe.fits), default=None)


class Strategy(Protocol):
    """Decides from probes."""

    def propose(self, history: Sequence[Probe]) -> ProbeRequest | BatchSizeChoice:
        """Propose the next step, given all probes in order. Raises ResourcesError if none fits."""
