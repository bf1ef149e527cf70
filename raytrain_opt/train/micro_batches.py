"""Which part of a global batch a process computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Of a step's time: a smaller gain is noise of the measured speeds.
WORTH = 0.05
# BatchNorm normalizes each micro-batch: below 8 samples its noise costs more than exact shares
# gain, unless workers differ so that only smaller ones share a step.
_USUAL_SPLIT, _USUAL_SAMPLES, _MIN_SAMPLES = 16, 8, 4


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


def sharing_cost(count: int, speeds: Sequence[float]) -> float:
    """Return the fraction of a step's time that whole micro-batches cost over exact shares."""
    shares = split_by_speed(count, speeds)
    longest = max(share / speed for share, speed in zip(shares, speeds, strict=True))
    return longest * sum(speeds) / count - 1


def time_saved(count: int, finer: int, speeds: Sequence[float]) -> float:
    """Return the fraction of a step's time that `finer` micro-batches save over `count`."""
    return 1 - (1 + sharing_cost(finer, speeds)) / (1 + sharing_cost(count, speeds))


def possible_splits(samples: int) -> list[int]:
    """Return into how many micro-batches of at least 4 a share of `samples` samples can be cut."""
    return [n for n in range(1, samples // _MIN_SAMPLES + 1) if samples % n == 0] or [1]


def usual_splits(samples: int) -> list[int]:
    """Return into how many micro-batches a share can be cut: at most 16 of at least 8 samples."""
    finest = min(_USUAL_SPLIT, samples // _USUAL_SAMPLES)
    return [n for n in possible_splits(samples) if n <= max(1, finest)]


def choose_split(samples: int, workers: int, speeds: Sequence[float], present: int = 1) -> int:
    """Return the number of micro-batches for each of `workers` equal shares of `samples` samples.

    The most of `usual_splits`. If that costs more than `WORTH`, fewer, or more of at least 4
    samples. A `present` number above 1 stays if it is as good.
    """
    splits, usual = possible_splits(samples), usual_splits(samples)[-1]
    if not speeds:
        return usual
    coarser = [n for n in reversed(splits) if n < usual]
    finer = [n for n in splits if n > usual]
    preferred = ([present] if present > 1 else []) + [usual, *coarser, *finer]

    def cost(split: int) -> float:
        return sharing_cost(split * workers, speeds)

    good = next((n for n in preferred if cost(n) <= WORTH), None)
    if good is not None:
        return good
    lowest = min(map(cost, preferred))
    return next(n for n in preferred if cost(n) <= lowest + WORTH)
