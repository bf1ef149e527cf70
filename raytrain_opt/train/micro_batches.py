"""Which part of a global batch a process computes."""

from __future__ import annotations

from collections.abc import Sequence
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
    def for_rank(cls, rank: int, speeds: Sequence[float], count: int) -> MicroBatches:
        """Return the micro-batches of one rank, when workers of these speeds share `count`."""
        shares = split_by_speed(count, speeds)
        start = sum(shares[:rank])
        return cls(range(start, start + shares[rank]), count, count / len(shares))

    @property
    def divisor(self) -> float:
        """What the sum of the gradients of this process is divided by."""
        return len(self.indices) if self.per_worker is None else self.per_worker

    def split(self, factor: int) -> MicroBatches:
        """Return the same samples in `factor` times as many micro-batches."""
        indices = range(self.indices.start * factor, self.indices.stop * factor)
        return MicroBatches(indices, self.count * factor, self.divisor * factor)


def split_by_speed(count: int, speeds: Sequence[float]) -> list[int]:
    """Return how many of `count` micro-batches each worker computes, at least one each.

    No other split lets the worker that is done last be done earlier. `count` is at least the
    number of workers.
    """
    total = sum(speeds)
    shares = [max(1, int(count * speed / total)) for speed in speeds]
    workers = range(len(speeds))
    while sum(shares) < count:
        first_done = min(workers, key=lambda w: (shares[w] + 1) / speeds[w])
        shares[first_done] += 1
    while sum(shares) > count:
        last_done = max(workers, key=lambda w: (shares[w] > 1, shares[w] / speeds[w]))
        shares[last_done] -= 1
    return shares
