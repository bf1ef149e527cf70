"""What a process counts in a phase of training."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from raytrain_opt.clock import monotonic_s
from raytrain_opt.results import TrainTotals
from raytrain_opt.train.micro_batches import MicroBatches

_MAX_TEXT = 500


@dataclass
class Phase:
    """One phase, that is, one call of `Learner.train`, and its sums.

    `tracked_before`: the numbers of batches that BatchNorm layers had counted at its start.
    """

    epoch: int
    micro_batches: MicroBatches
    tracked_before: dict[str, int]
    search: bool
    held_out: int
    loss_sum: Tensor  # [1], float64, on the device
    steps: int = 0
    samples: int = 0
    skipped: int = 0
    data_wait_s: float = 0.0
    started_s: float = field(default_factory=monotonic_s)
    updating: bool = False  # the weights are between two steps
    in_backward: bool = False
    failure: Exception | None = None  # the first that a pass or an update raised (`failures`)

    def totals(self) -> TrainTotals:
        """Return the sums so far; this waits for the device."""
        [loss_sum] = self.loss_sum.tolist()
        return TrainTotals(
            steps=self.steps,
            samples=self.samples,
            loss_sum=loss_sum,
            skipped=self.skipped,
            duration_s=monotonic_s() - self.started_s,
            data_wait_s=self.data_wait_s,
            failure=describe(self.failure),
        )


def describe(error: Exception | None) -> str:
    """Return the type and the text of an exception, which may contain all values of a tensor."""
    return "" if error is None else f"{type(error).__name__}: {error}"[:_MAX_TEXT]
