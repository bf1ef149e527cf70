"""What phases of training and evaluation add up to. Free of torch: the mailbox reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class GradientNorms:
    """Squared norms of gradients, a pair for each update that was looked at: the mean of those of
    `small_batch` samples, and that of all `big_batch` together. See `search.noise_scale`.
    """

    small_batch: int
    big_batch: int
    pairs: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class TrainTotals:
    """Sums over the samples of one training phase (of one process, or reduced over all). `norms`:
    of all processes together, where they were measured.
    """

    steps: int
    samples: int
    loss_sum: float
    correct: int
    skipped: int
    seconds: float
    data_wait_s: float
    norms: GradientNorms | None = None

    @property
    def loss(self) -> float:
        """Mean training loss; not finite when any step's was not."""
        return self.loss_sum / max(self.samples, 1)

    @property
    def accuracy(self) -> float:
        """Share of training samples predicted right, measured while training."""
        return self.correct / max(self.samples, 1)


# So few that a split has many blocks, so many that their losses take little time.
BLOCK = 16


@dataclass(frozen=True)
class EvalTotals:
    """Sums over the samples of one evaluation; every sample counts exactly once. `block_losses`:
    the mean loss of each block of BLOCK samples, when they were asked for.
    """

    samples: int
    loss_sum: float
    correct: int
    correct_top5: int
    seconds: float
    block_losses: tuple[float, ...] = ()

    @property
    def loss(self) -> float:
        """Mean loss over the split."""
        return self.loss_sum / max(self.samples, 1)

    @property
    def accuracy(self) -> float:
        """Top-1: share of samples whose best guess is right."""
        return self.correct / max(self.samples, 1)

    @property
    def top5(self) -> float:
        """Share of samples whose label is among the five best guesses."""
        return self.correct_top5 / max(self.samples, 1)


@dataclass(frozen=True)
class Buffers:
    """What one worker's forward passes did to its model, after `batches` of them: floating-point
    buffers by name, and by the names of the BatchNorm layers that moved, the s of
    `train.batchnorm`.
    """

    batches: int
    values: dict[str, npt.NDArray[np.float64]]
    by_chance: dict[str, float]


@dataclass(frozen=True)
class Report:
    """One worker's part of an asynchronous phase: shares that it computed, seconds in all and by
    part, and what they did to its buffers.
    """

    shares: int
    seconds: float
    data_wait_s: float
    parts_s: dict[str, float]
    buffers: Buffers
