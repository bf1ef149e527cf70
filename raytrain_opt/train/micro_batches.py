"""Which part of a global batch a process computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of a global batch that this process computes.

    A global batch is split into `count` micro-batches of equal size; this process computes
    those at `indices`. It sums their gradients and divides by `per_worker`, the mean number of
    micro-batches per worker (None: the number of indices), so that the mean over the workers,
    which DDP takes, is the mean over all micro-batches.
    """

    indices: range
    count: int
    per_worker: float | None = None

    @classmethod
    def for_rank(cls, rank: int, world_size: int, count: int) -> MicroBatches:
        """Return the micro-batches of one rank, when `count` are split as evenly as possible.

        `count` is at least `world_size`; the ranks' numbers of micro-batches differ by at most 1.
        """
        indices = range(rank * count // world_size, (rank + 1) * count // world_size)
        return cls(indices, count, count / world_size)

    @property
    def divisor(self) -> float:
        """What the sum of the gradients of this process is divided by."""
        return len(self.indices) if self.per_worker is None else self.per_worker

    def split(self, factor: int) -> MicroBatches:
        """Return the same samples in `factor` times as many micro-batches."""
        indices = range(self.indices.start * factor, self.indices.stop * factor)
        return MicroBatches(indices, self.count * factor, self.divisor * factor)
