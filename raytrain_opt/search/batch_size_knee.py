"""ThroughputKnee: the smallest batch size that is about as fast as the fastest one.

Ours. Every proposal draws likely curves of samples/s from the measurements
(search/throughput_model.py) and asks of each size which share of the best samples/s it loses:

- the *knee* is the smallest size that loses no more than `tolerance` on the middle curve;
- not measured yet: measure it;
- measured, and 95 % of the curves say that it loses no more than 1.5 times `tolerance`:
  choose it, unless a smaller size that nobody measured does as well on a quarter of them: try
  that first. There is no threshold in samples/s: noise makes the curves differ, and the more
  they do, the more is measured;
- otherwise its *rival* is the size that most often beats it by more than that. Measure the
  size, old or new, that tells most about the difference between the two.

With `objective: goodput` all this is about samples/s times the progress of a sample, which falls
with the global batch: 1 / (1 + global batch / noise scale) (see search/noise_scale.py). The noise
scale is that of all probes so far.

Sizes grow by a factor of 4 at most; after one that did not fit, the range up to it is halved
(in the logarithm), and only while sizes in it could be faster by more than the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from raytrain_opt.config.batch_size import ThroughputKneeSearch
from raytrain_opt.search.batch_size import Ask, Choice, Limits, Measurement
from raytrain_opt.search.memory_bound import (
    ask_for_first_fit,
    fitting,
    largest_open,
    smallest_unfit,
)
from raytrain_opt.search.noise_scale import NoiseScale, log_efficiency, pooled
from raytrain_opt.search.throughput_model import Array, Point, combine, draw_curves

_SURE = 0.95
_SLACK = 1.5
_HOPE = 0.25
_GROWTH = 4
# Devices work in tiles: sizes between powers of two are considered from here, as multiples of it.
_TILE = 32


@dataclass(frozen=True)
class ThroughputKnee:
    """The strategy with its section of the job file."""

    section: ThroughputKneeSearch
    limits: Limits

    def propose(self, history: Sequence[Measurement]) -> Ask | Choice:
        """The next size to measure, or the knee.

        Halving a start that does not fit may take more than `max_probes`: the choice must fit.
        Raises ResourcesError when size 1 does not fit.
        """
        ask = ask_for_first_fit(history, self.limits, self.section.start)
        if ask is not None:
            return ask
        measured = fitting(history, self.limits)
        outlook = self._outlook(measured, largest_open(history, self.limits))
        if len(history) >= self.section.max_probes:
            size = outlook.knee(self.section.tolerance, only_measured=True)
            return Choice(size, f"stopped after max_probes: {outlook.describe(size)}")
        return self._decide(outlook, smallest_unfit(history))

    def _outlook(self, measured: Sequence[Measurement], largest: int) -> _Outlook:
        outlook = _Outlook.after(measured, largest)
        if self.section.objective == "samples_per_s":
            return outlook
        found = [NoiseScale.of(m.norms) for m in measured if m.norms is not None]
        parts = [noise for noise in found if noise is not None]
        return outlook.at(pooled(parts) if parts else None, self.limits.workers)

    def _decide(self, outlook: _Outlook, unfit: int | None) -> Ask | Choice:
        knee = outlook.knee(self.section.tolerance)
        if not outlook.is_measured(knee):
            size = _reach(knee, outlook, unfit)
            way = "predicted knee" if size == knee else "on the way to the predicted knee"
            return Ask(size, f"{way}: {outlook.describe(knee)}")
        lost = _log_loss(_SLACK * self.section.tolerance)
        if outlook.share_within(knee, lost) >= _SURE:
            smaller = outlook.worth_a_try(knee, self.section.tolerance)
            if smaller is None:
                return Choice(knee, outlook.describe(knee))
            return Ask(smaller, f"{smaller} may do, too: {outlook.describe(smaller)}")
        rival = outlook.rival(knee, lost)
        size = outlook.most_informative(knee, rival)
        reason = f"may {rival} be faster than {knee}? {outlook.describe(knee)}"
        return Ask(_reach(size, outlook, unfit), reason)


@dataclass(frozen=True)
class _Outlook:
    """Likely curves at the sizes worth a thought, and what each size loses on each curve."""

    points: tuple[Point, ...]
    sizes: tuple[int, ...]
    curves: Array  # log of what is to be large, [curve, size]
    noise: float  # of one more measurement, as a share of samples/s
    what: str = "samples/s"

    @classmethod
    def after(cls, measured: Sequence[Measurement], largest: int) -> _Outlook:
        points = combine(measured)
        sizes = _sizes_worth_a_thought([p.batch_size for p in points], largest)
        errors = [p.error * math.sqrt(_times(measured, p.batch_size)) for p in points]
        return cls(tuple(points), sizes, draw_curves(points, sizes), float(np.median(errors)))

    def at(self, noise: NoiseScale | None, workers: int) -> _Outlook:
        """The same for goodput; without a noise scale every sample counts alike."""
        if noise is None:
            return replace(self, what="goodput (no noise scale could be measured)")
        costs = [log_efficiency(noise.value, workers * size) for size in self.sizes]
        what = f"goodput at a noise scale of {noise}"
        return replace(self, curves=self.curves + np.array(costs), what=what)

    @property
    def largest_measured(self) -> int:
        return self.points[-1].batch_size

    @property
    def losses(self) -> Array:
        """log(best / this size's), [curve, size]."""
        losses: Array = self.curves.max(axis=1, keepdims=True) - self.curves
        return losses

    def is_measured(self, size: int) -> bool:
        return any(p.batch_size == size for p in self.points)

    def knee(self, tolerance: float, *, only_measured: bool = False) -> int:
        """The smallest size that loses no more than `tolerance` on the middle curve.

        The middle, size by size: the best of a single curve is too good to be likely, as the
        largest of many uncertain values.
        """
        middle = np.median(self.curves, axis=0)
        if only_measured:
            middle[[not self.is_measured(size) for size in self.sizes]] = -np.inf
        enough = middle >= middle.max() - _log_loss(tolerance)
        return self.sizes[int(enough.argmax())]

    def share_within(self, size: int, lost: float) -> float:
        """On which share of the curves `size` loses no more than `lost` (a log)."""
        return float((self.losses[:, self.sizes.index(size)] <= lost).mean())

    def worth_a_try(self, knee: int, tolerance: float) -> int | None:
        """The unmeasured size below `knee` that promises most octaves; None without hope."""
        shares = (self.losses <= _log_loss(tolerance)).mean(axis=0)
        octaves = {
            size: share * math.log2(knee / size)
            for size, share in zip(self.sizes, shares, strict=True)
            if size < knee and share >= _HOPE and not self.is_measured(size)
        }
        return max(octaves, key=lambda size: octaves[size], default=None)

    def rival(self, knee: int, lost: float) -> int:
        """The size that most often beats `knee` by more than `lost` (a log)."""
        ahead = self.curves - self.curves[:, [self.sizes.index(knee)]]
        return self.sizes[int((ahead > lost).mean(axis=0).argmax())]

    def most_informative(self, knee: int, rival: int) -> int:
        """The size whose measurement takes most of the variance of knee - rival.

        Not one far below both: all the model says there is about another kind of step.
        """
        centred = self.curves - self.curves.mean(axis=0)
        apart = centred[:, self.sizes.index(rival)] - centred[:, self.sizes.index(knee)]
        told = (centred * apart[:, None]).mean(axis=0) ** 2
        told /= (centred**2).mean(axis=0) + self.noise**2
        sizes = np.array(self.sizes)
        low, high = min(knee, rival) / _GROWTH, _GROWTH * self.largest_measured
        told[(sizes < low) | (sizes > high)] = -1
        return self.sizes[int(told.argmax())]

    def describe(self, size: int) -> str:
        """For people: how fast `size` is."""
        shares = np.exp(-self.losses[:, self.sizes.index(size)])
        low, middle = (100 * float(q) for q in np.quantile(shares, [1 - _SURE, 0.5]))
        return (
            f"{size} gives about {middle:.1f} % of the best {self.what} up to {self.sizes[-1]}, "
            f"{_SURE:.0%} sure of {low:.1f} %"
        )


def _log_loss(share: float) -> float:
    return -math.log1p(-min(share, 0.99))


def _times(measured: Sequence[Measurement], size: int) -> int:
    return sum(m.batch_size == size for m in measured)


def _sizes_worth_a_thought(measured: Sequence[int], largest: int) -> tuple[int, ...]:
    """Powers of two, from 3 tiles on also those in the middle; what was measured; the largest.

    Closer ones differ by less than can be measured. Ascending. Not 1, unless nothing else
    fits: batch normalisation over vectors cannot be trained with one sample.
    """
    powers = {2**i for i in range(1, largest.bit_length())}
    middles = {size // 2 * 3 for size in powers if size >= 2 * _TILE}
    bounds = {largest} | {largest - largest % tile for tile in (8, _TILE) if largest > tile}
    return tuple(sorted(s for s in powers | middles | bounds | set(measured) if s <= largest))


def _reach(size: int, outlook: _Outlook, unfit: int | None) -> int:
    """`size`, or what is to be measured before it: sizes near the end of memory need care."""
    fits = outlook.largest_measured
    if size <= fits:
        return size
    if unfit is not None:
        return _between(fits, unfit)
    return size if size <= _GROWTH * fits else 2 ** int(math.log2(_GROWTH * fits))


def _between(fits: int, unfit: int) -> int:
    """Half way in the logarithm, on a multiple of a tile, or of 8, where there is one."""
    middle = math.sqrt(fits * unfit)
    for multiple in (_TILE, 8):
        size = multiple * round(middle / multiple)
        if fits < size < unfit:
            return size
    return min(max(round(middle), fits + 1), unfit - 1)
