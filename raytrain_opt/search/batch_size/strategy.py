"""The interface of a batch-size strategy.

A strategy takes all measurements so far and returns the next size to measure, or the chosen
size, with a reason. Strategies are pure, like learning-rate policies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from raytrain_opt.results import GradientNorms, Probe


@dataclass(frozen=True)
class Measurement:
    """The part of a probe that a strategy uses. Batch sizes are per worker.

    `out_of_memory` includes sizes that leave less than the memory reserve.
    `samples_per_s_error` is a standard error. `utilization_pct` is the mean of the top half of
    the samples, nan without samples. `norms` are measured if the strategy needs them.
    """

    batch_size: int
    status: Literal["ok", "out_of_memory"]
    samples_per_s: float = math.nan
    samples_per_s_error: float = math.nan
    utilization_pct: float = math.nan
    norms: GradientNorms | None = None

    @classmethod
    def from_probe(cls, probe: Probe) -> Measurement:
        """Take what a strategy uses from a probe."""
        return cls(
            probe.batch_size,
            probe.status,
            probe.samples_per_s,
            probe.samples_per_s_error,
            probe.utilization_pct,
            probe.norms,
        )

    @property
    def fits(self) -> bool:
        """Whether training with this size fits into memory."""
        return self.status == "ok"


@dataclass(frozen=True)
class SizeBounds:
    """The allowed batch sizes per worker, 1 to `largest`.

    An epoch has `epoch_samples` per worker; the global batch is `workers` times a size.
    """

    largest: int
    epoch_samples: int
    workers: int = 1


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


class Strategy(Protocol):
    """Decides from measurements."""

    def propose(self, history: Sequence[Measurement]) -> ProbeRequest | BatchSizeChoice:
        """Propose the next step, given all measurements in their order.

        Raises ResourcesError if not even the smallest size fits into memory.
        """
        ...
