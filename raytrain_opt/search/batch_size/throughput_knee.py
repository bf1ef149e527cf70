"""ThroughputKnee: the smallest batch size that is about as fast as the fastest one.

Ours. Each proposal draws likely curves of samples/s from the measurements (see
`throughput_model`) and computes for each size the fraction of the best samples/s that it loses:

- The *knee* is the smallest size that loses at most `tolerance` on the median curve.
- If the knee is not measured yet, measure it.
- If it is measured, and on 95 % of the curves it loses at most 1.5 times `tolerance`, choose
  it; but first try a smaller unmeasured size if that does as well on a quarter of the curves.
  There is no threshold in samples/s: the noisier the measurements, the more the curves differ
  and the more sizes are measured.
- Otherwise its *competitor* is the size that most often beats it by more than that. Measure
  the size, new or again, that reveals most about the difference between the two.

With `objective: goodput` all this holds for samples/s times the progress per sample, which falls
with the global batch size: 1 / (1 + global batch size / noise scale), see `search.noise_scale`.
The noise scale is the one that an earlier run of the job measured, else that of all probes.

Sizes grow at most by a factor of 4. After a size that did not fit, the interval up to it is
bisected (in the logarithm), while sizes in it may be faster by more than the tolerance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from raytrain_opt.config.batch_size import ThroughputKneeSearch
from raytrain_opt.results import Probe
from raytrain_opt.search.batch_size.strategy import BatchSizeChoice, ProbeRequest, SizeBounds
from raytrain_opt.search.batch_size.throughput_model import Array, Point, combine, draw_curves
from raytrain_opt.search.noise_scale import NoiseScale, log_efficiency, pool_noise_scales

# Limit of the search, repetitions included.
_MAX_PROBES = 12
# Fraction of the curves that must agree before a size is chosen.
_CONFIDENCE = 0.95
# The confidence of one side of a normal distribution, in standard errors.
_ERRORS = 1.645
# A size may lose this many times the tolerance on those curves.
_SLACK = 1.5
# A smaller size is tried if it is good enough on this fraction of the curves.
_MIN_CHANCE = 0.25
# Largest factor between a size that fits and the next one, so that memory is not exceeded by far.
_MAX_GROWTH = 4
# Devices compute in tiles of about this many samples: from two tiles on, sizes between powers of
# two are considered, as multiples of it.
_TILE = 32


@dataclass(frozen=True)
class ThroughputKnee:
    """Searches for the knee with as few probes as the noise allows."""

    section: ThroughputKneeSearch
    bounds: SizeBounds
    weighs_checks = True

    def propose(self, history: Sequence[Probe]) -> ProbeRequest | BatchSizeChoice:
        """Propose the next size to measure, or choose the knee.

        Halving an initial size that does not fit may take more than `_MAX_PROBES`, because the
        choice must fit. Raises ResourcesError if size 1 does not fit.
        """
        request = self.bounds.request_first_fit(history, self.section.initial)
        if request is not None:
            return request
        measured = self.bounds.fitting(history)
        posterior = self._posterior(measured, self.bounds.largest_open(history))
        if len(history) >= _MAX_PROBES:
            size = posterior.knee(self.section.tolerance, only_measured=True)
            return BatchSizeChoice(
                size, f"stopped after {_MAX_PROBES} probes: {posterior.describe(size)}"
            )
        return self._decide(posterior, self.bounds.smallest_excluded(history))

    def _posterior(self, measured: Sequence[Probe], largest: int) -> _Posterior:
        posterior = _Posterior.from_measurements(measured, largest)
        objective, known = self.section.objective, self.bounds.noise_scale
        if objective == "samples_per_s" or (objective == "auto" and known is None):
            return posterior
        if known is not None:
            return posterior.of_goodput(known, f"{known:.3g}", self.bounds.workers)
        estimates = [NoiseScale.from_norms(m.norms) for m in measured if m.norms is not None]
        valid = [estimate for estimate in estimates if estimate is not None]
        if not valid:
            return replace(posterior, objective="goodput (no noise scale could be measured)")
        noise = pool_noise_scales(valid)
        return posterior.of_goodput(noise.value, str(noise), self.bounds.workers)

    def _decide(
        self, posterior: _Posterior, too_large: int | None
    ) -> ProbeRequest | BatchSizeChoice:
        knee = posterior.knee(self.section.tolerance)
        if not posterior.is_measured(knee):
            size = _next_towards(knee, posterior, too_large)
            purpose = "predicted knee" if size == knee else "on the way to the predicted knee"
            return ProbeRequest(size, f"{purpose}: {posterior.describe(knee)}")
        max_loss = _log_loss(_SLACK * self.section.tolerance)
        if posterior.probability_within(knee, max_loss) >= _CONFIDENCE:
            smaller = posterior.smaller_to_try(knee, self.section.tolerance)
            if smaller is None:
                return BatchSizeChoice(knee, posterior.describe(knee))
            return ProbeRequest(
                smaller, f"{smaller} may be fast enough: {posterior.describe(smaller)}"
            )
        competitor = posterior.competitor(knee, max_loss)
        size = posterior.most_informative(knee, competitor)
        reason = f"is {competitor} faster than {knee}? {posterior.describe(knee)}"
        return ProbeRequest(_next_towards(size, posterior, too_large), reason)


@dataclass(frozen=True)
class _Posterior:
    """Likely curves of the objective, sampled at the candidate sizes."""

    points: tuple[Point, ...]
    sizes: tuple[int, ...]
    curves: Array  # log of the objective, [curve, size]
    noise: float  # relative standard error of one more measurement
    objective: str = "samples/s"

    @classmethod
    def from_measurements(cls, measured: Sequence[Probe], largest: int) -> _Posterior:
        points = combine(measured)
        sizes = _candidate_sizes([p.batch_size for p in points], largest)
        repeats = Counter(m.batch_size for m in measured)
        errors = [p.error * math.sqrt(repeats[p.batch_size]) for p in points]
        return cls(tuple(points), sizes, draw_curves(points, sizes), float(np.median(errors)))

    def of_goodput(self, noise_scale: float, text: str, workers: int) -> _Posterior:
        """Return the curves of goodput; `text`: the noise scale for messages."""
        efficiencies = [log_efficiency(noise_scale, workers * size) for size in self.sizes]
        objective = f"goodput at a noise scale of {text}"
        return replace(self, curves=self.curves + np.array(efficiencies), objective=objective)

    @property
    def largest_measured(self) -> int:
        return self.points[-1].batch_size

    @property
    def losses(self) -> Array:
        """log(best objective / objective of the size), [curve, size]."""
        losses: Array = self.curves.max(axis=1, keepdims=True) - self.curves
        return losses

    def is_measured(self, size: int) -> bool:
        return any(p.batch_size == size for p in self.points)

    def knee(self, tolerance: float, *, only_measured: bool = False) -> int:
        """Return the smallest size that loses at most `tolerance` on the median curve.

        The median is taken for each size: the maximum of a single curve is the largest of many
        uncertain values, and therefore too optimistic.
        """
        median = np.median(self.curves, axis=0)
        if only_measured:
            median[[not self.is_measured(size) for size in self.sizes]] = -np.inf
        good_enough = median >= median.max() - _log_loss(tolerance)
        return self.sizes[int(good_enough.argmax())]

    def probability_within(self, size: int, max_loss: float) -> float:
        """Return the fraction of the curves on which `size` loses at most `max_loss` (a log)."""
        return float((self.losses[:, self.sizes.index(size)] <= max_loss).mean())

    def smaller_to_try(self, knee: int, tolerance: float) -> int | None:
        """Return the unmeasured size below `knee` with most expected octaves saved, or None."""
        chances = (self.losses <= _log_loss(tolerance)).mean(axis=0)
        octaves = {
            size: chance * math.log2(knee / size)
            for size, chance in zip(self.sizes, chances, strict=True)
            if size < knee and chance >= _MIN_CHANCE and not self.is_measured(size)
        }
        return max(octaves, key=lambda size: octaves[size], default=None)

    def competitor(self, knee: int, max_loss: float) -> int:
        """Return the size that most often beats `knee` by more than `max_loss` (a log)."""
        advantage = self.curves - self.curves[:, [self.sizes.index(knee)]]
        return self.sizes[int((advantage > max_loss).mean(axis=0).argmax())]

    def most_informative(self, knee: int, competitor: int) -> int:
        """Return the size whose measurement most reduces the variance of competitor - knee.

        Sizes far below both are excluded: their steps are bound by other costs, about which the
        model would learn instead.
        """
        centered = self.curves - self.curves.mean(axis=0)
        difference = (
            centered[:, self.sizes.index(competitor)] - centered[:, self.sizes.index(knee)]
        )
        reduction = (centered * difference[:, None]).mean(axis=0) ** 2
        reduction /= (centered**2).mean(axis=0) + self.noise**2
        sizes = np.array(self.sizes)
        low, high = min(knee, competitor) / _MAX_GROWTH, _MAX_GROWTH * self.largest_measured
        reduction[(sizes < low) | (sizes > high)] = -1
        return self.sizes[int(reduction.argmax())]

    def describe(self, size: int) -> str:
        """Describe how fast `size` is, for messages.

        The model knows that a larger batch is hardly ever slower, whatever its probes measured;
        the stated confidence does not exceed what they support.
        """
        fractions = np.exp(-self.losses[:, self.sizes.index(size)])
        low, median = (100 * float(q) for q in np.quantile(fractions, [1 - _CONFIDENCE, 0.5]))
        errors = [point.error for point in self.points if point.batch_size == size]
        low = min([low, *(100 * math.exp(-_ERRORS * error) for error in errors)])
        return (
            f"{size} reaches about {median:.1f} % of the best {self.objective} up to "
            f"{self.sizes[-1]}, with {_CONFIDENCE:.0%} confidence at least {low:.1f} %"
        )


def _log_loss(fraction: float) -> float:
    return -math.log1p(-min(fraction, 0.99))


def _candidate_sizes(measured: Sequence[int], largest: int) -> tuple[int, ...]:
    """Return powers of two, midpoints from 3 tiles on, measured sizes and the largest; ascending.

    Closer sizes differ by less than can be measured. 1 is a candidate only if nothing else
    fits: BatchNorm1d cannot be trained with one sample.
    """
    powers = {2**i for i in range(1, largest.bit_length())}
    midpoints = {size // 2 * 3 for size in powers if size >= 2 * _TILE}
    ends = {largest} | {largest - largest % tile for tile in (8, _TILE) if largest > tile}
    return tuple(sorted(s for s in powers | midpoints | ends | set(measured) if s <= largest))


def _next_towards(size: int, posterior: _Posterior, too_large: int | None) -> int:
    """Return `size`, or a smaller one to measure first: memory may run out on the way."""
    fits = posterior.largest_measured
    if size <= fits:
        return size
    if too_large is not None:
        return _between(fits, too_large)
    return size if size <= _MAX_GROWTH * fits else 2 ** int(math.log2(_MAX_GROWTH * fits))


def _between(fits: int, too_large: int) -> int:
    """Return the geometric mean, rounded to a multiple of a tile, or of 8, if one fits between."""
    middle = math.sqrt(fits * too_large)
    for multiple in (_TILE, 8):
        size = multiple * round(middle / multiple)
        if fits < size < too_large:
            return size
    return min(max(round(middle), fits + 1), too_large - 1)
