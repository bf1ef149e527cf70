"""What a batch-size strategy is: measurements so far in, the next size to measure or the
chosen one out, with a reason. Strategies are pure, like learning-rate policies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from raytrain_opt.train.probe_result import Probe
from raytrain_opt.train.totals import GradientNorms


@dataclass(frozen=True)
class Measurement:
    """What a strategy learns from one probe. Batch sizes are per worker.

    `out_of_memory` also stands for a size that would use up the memory reserve. `_error` is a
    standard error (samples/s). Utilisation in percent: the mean of the top half of the
    samples; nan where none was sampled. `norms`: of gradients, where the strategy asks for them.
    """

    batch_size: int
    status: Literal["ok", "out_of_memory"]
    samples_per_s: float = math.nan
    samples_per_s_error: float = math.nan
    utilization_pct: float = math.nan
    norms: GradientNorms | None = None

    @classmethod
    def of(cls, probe: Probe) -> Measurement:
        """What a strategy gets to know of a probe."""
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
        """Whether the size can be trained with."""
        return self.status == "ok"


@dataclass(frozen=True)
class Limits:
    """Sizes from 1 to `largest` are allowed; an epoch has `epoch_samples` (per worker). The global
    batch is `workers` times a size.
    """

    largest: int
    epoch_samples: int
    workers: int = 1


@dataclass(frozen=True)
class Ask:
    """Measure this size next (perhaps again)."""

    batch_size: int
    reason: str


@dataclass(frozen=True)
class Choice:
    """Train with this size. `batch_size` is one that was measured and fits."""

    batch_size: int
    reason: str


class Strategy(Protocol):
    """A batch-size strategy."""

    def propose(self, history: Sequence[Measurement]) -> Ask | Choice:
        """What to do next, given all measurements in their order.

        Raises ResourcesError when not even the smallest size fits into memory.
        """
        ...
