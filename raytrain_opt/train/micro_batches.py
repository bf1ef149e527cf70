"""Which micro-batches of a global batch are computed, and how workers share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

# BatchNorm normalizes each micro-batch: with less than 8 samples it is noisy.
_USUAL_SPLIT, _USUAL_SAMPLES = 16, 8


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of each global batch that are computed: `indices` of `count`.

    By one process, or by all workers together, which share them (`train.data_parallel`). An update
    follows the mean of their gradients.
    """

    indices: range
    count: int

    @classmethod
    def all(cls, count: int) -> MicroBatches:
        """Return all of `count` micro-batches."""
        return cls(range(count), count)

    def split(self, factor: int) -> MicroBatches:
        """Return the same samples in `factor` times as many micro-batches."""
        indices = range(self.indices.start * factor, self.indices.stop * factor)
        return MicroBatches(indices, self.count * factor)


def split_by_speed(count: int, speeds: Sequence[float]) -> list[range]:
    """Return which of `count` micro-batches each worker computes, at least one each.

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
    ends = list(accumulate(shares))
    return [range(end - share, end) for end, share in zip(ends, shares, strict=True)]


def step_time(shares: Sequence[range], speeds: Sequence[float]) -> float:
    """Return the time until the last worker is done, relative to exact shares."""
    longest = max(len(share) / speed for share, speed in zip(shares, speeds, strict=True))
    return longest * sum(speeds) / sum(map(len, shares))


def usual_splits(samples: int) -> list[int]:
    """Return into how many micro-batches a share can be cut: at most 16 of at least 8 samples."""
    finest = max(1, min(_USUAL_SPLIT, samples // _USUAL_SAMPLES))
    return [n for n in range(1, finest + 1) if samples % n == 0]
