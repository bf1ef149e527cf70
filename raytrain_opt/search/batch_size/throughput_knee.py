"""ThroughputKnee: the smallest batch size that is about as fast as the fastest one.

Ours. Each proposal draws likely curves of samples/s from the measurements (see below) and computes
for each size the fraction of the best samples/s that it loses:

- The *knee* is the smallest size that loses at most `tolerance` on the median curve. If it is not
  measured yet, measure it.
- If it is measured, and on 95 % of the curves it loses at most 1.5 times `tolerance`, choose it;
  but first try a smaller unmeasured size if that does as well on a quarter of the curves. The
  noisier the measurements, the more the curves differ and the more sizes are measured.
- Otherwise its *competitor* is the size that most often beats it by more than that. Measure it,
  or again the one of the two that is known with less precision.

Sizes grow at most by a factor of 4. After a size that did not fit, the interval up to it is
bisected (in the logarithm), while sizes in it may be faster by more than the tolerance.

The model: a step of b samples has a fixed cost c (kernel launches, update, communication) and a
cost k for each sample, padding included: w is b rounded up to a multiple of the tile. The two
costs may add up (c + k w seconds) or overlap (the longer of the two). So

    log samples/s = level + log(b / w) - log(1 + (h / w) ^ p) / p + deviation,    h = c / k

    h          size at which both costs are equal: far below it, size is free; above, useless
    p          1: the costs add up; the larger p, the more they overlap, the sharper the knee
    tile       samples that are computed together: a partly filled tile wastes time
    deviation  everything else: a random walk over log2 b, plus an amount per size

h, p, tile and the spread of the deviation take values on a grid, weighted by the likelihood of
the measurements; given these, level and deviation are Gaussian. The result is a set of curves
drawn from this mixture, always the same for the same measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raytrain_opt.config.batch_size import ThroughputKneeSearch
from raytrain_opt.results import Probe
from raytrain_opt.search.batch_size.strategy import BatchSizeChoice, ProbeRequest, SizeBounds

Array = NDArray[np.float64]

_OVERLAPS = (1.0, 2.0, 4.0, 16.0)
_TILES = (1, 8, 32)
_H_PER_OCTAVE, _H_SMALLEST, _H_BEYOND_LARGEST = 2, 2.0**-6, 2.0**6
# (spread, prior probability): deviations of 1 % are typical, larger ones possible.
_SPREADS = ((0.01, 0.80), (0.03, 0.15), (0.10, 0.05))
_OCTAVES = 3.0  # correlation length of the deviation
_PER_SIZE = 0.5  # spread of the amount per size, as a fraction of the deviation's spread
_LEVEL_SPREAD = 3.0  # of the level around the first measurement: hardly any constraint
_CURVES = 400  # the fraction of curves near 5 % then has a standard error of 1 %
_MIN_ERROR = 5e-3  # relative; probes have errors that a single probe cannot measure
_UNKNOWN_ERROR = 0.5  # relative; for measurements without an error
_JITTER = 1e-9  # keeps covariances of equal sizes positive definite


@dataclass(frozen=True)
class Point:
    """All measurements of one size combined: the log of samples/s and its standard error."""

    batch_size: int
    log_rate: float
    error: float


def combine(measurements: Sequence[Probe]) -> list[Point]:
    """Combine the measurements of each size by inverse variance; sizes ascend.

    If repeats differ by more than their errors, all errors are scaled to match: a probe's error
    does not include what changes between probes.
    """
    sizes, group = np.unique([m.batch_size for m in measurements], return_inverse=True)
    rates = np.array([m.samples_per_s for m in measurements])
    errors = np.array([m.samples_per_s_error for m in measurements]) / rates
    errors = np.where(np.isfinite(errors), np.maximum(errors, _MIN_ERROR), _UNKNOWN_ERROR)
    log_rates, weights = np.log(rates), errors**-2
    totals = np.bincount(group, weights)
    means = np.bincount(group, weights * log_rates) / totals
    scatter = float((((log_rates - means[group]) / errors) ** 2).sum())
    repeats = len(rates) - len(sizes)
    scale = max(1.0, math.sqrt(scatter / repeats)) if repeats else 1.0
    mean_errors = scale * totals**-0.5
    return list(map(Point, sizes.tolist(), means.tolist(), mean_errors.tolist()))


def draw_curves(points: Sequence[Point], sizes: Sequence[int]) -> Array:
    """Draw likely curves, log samples/s [curve, size], given at least one point."""
    measured = np.array([p.batch_size for p in points], dtype=np.float64)
    queried = np.array(sizes, dtype=np.float64)
    measured_shapes, shapes = _shapes(measured, queried.max()), _shapes(queried, queried.max())
    offsets = measured_shapes[:, :1] - points[0].log_rate
    residuals = np.array([p.log_rate for p in points]) - (measured_shapes - offsets)
    noise = np.diag([p.error**2 for p in points])
    means, roots, log_weights = [], [], []
    for spread, prior in _SPREADS:
        root = np.linalg.cholesky(_covariance(spread, measured, measured) + noise)
        scaled = np.linalg.solve(root, residuals.T)
        gain = np.linalg.solve(root, _covariance(spread, measured, queried))
        covariance = _covariance(spread, queried, queried) - gain.T @ gain
        means.append(shapes - offsets + (gain.T @ scaled).T)
        roots.append(np.linalg.cholesky(covariance + _JITTER * np.eye(len(queried))))
        log_likelihoods = -0.5 * (scaled**2).sum(axis=0) - np.log(np.diag(root)).sum()
        log_weights.append(math.log(prior) + log_likelihoods)
    weights = np.cumsum(np.exp(np.concatenate(log_weights) - np.max(log_weights)))
    quantiles = (np.arange(_CURVES) + 0.5) / _CURVES
    components = np.searchsorted(weights / weights[-1], quantiles)
    normal = np.random.default_rng(0).standard_normal((_CURVES, len(queried)))
    deviations = np.einsum("cj,cij->ci", normal, np.array(roots)[components // len(shapes)])
    curves: Array = np.concatenate(means)[components] + deviations
    return curves


def _shapes(sizes: Array, largest: float) -> Array:
    """Return the model without level and deviation for each tile, p and h: [shape, size]."""
    octaves = math.log2(largest * _H_BEYOND_LARGEST / _H_SMALLEST)
    h = _H_SMALLEST * 2.0 ** np.linspace(0, octaves, 1 + math.ceil(octaves * _H_PER_OCTAVE))
    shapes = []
    for tile in _TILES:
        w = tile * np.ceil(sizes / tile)
        log_ratio = np.log(h[:, None] / w)
        shapes += [np.log(sizes / w) - np.logaddexp(0, p * log_ratio) / p for p in _OVERLAPS]
    return np.concatenate(shapes)


def _covariance(spread: float, a: Array, b: Array) -> Array:
    """Return the covariance of level plus deviation at sizes `a` and `b`: [a, b]."""
    octaves = np.abs(np.log2(a)[:, None] - np.log2(b)[None, :])
    walk = np.exp(-octaves / _OCTAVES) + _PER_SIZE**2 * (octaves == 0)
    covariance: Array = _LEVEL_SPREAD**2 + spread**2 * walk
    return covariance


_MAX_PROBES = 12  # repetitions included
_CONFIDENCE = 0.95  # fraction of the curves that must agree before a size is chosen
_ERRORS = 1.645  # that confidence of one side of a normal distribution, in standard errors
_SLACK = 1.5  # a size may lose this many times the tolerance on those curves
_MIN_CHANCE = 0.25  # a smaller size is tried if it is good enough on this fraction of the curves
_MAX_GROWTH = 4  # from a size that fits to the next one, so that memory is not exceeded by far
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
        """Propose the next size, or choose the knee. Raises ResourcesError if 1 does not fit."""
        if request := self.bounds.request_first_fit(history, self.section.initial):
            return request
        points = combine(self.bounds.fitting(history))
        largest = self.bounds.largest_open(history)
        sizes = _candidate_sizes([p.batch_size for p in points], largest)
        posterior = _Posterior(tuple(points), sizes, draw_curves(points, sizes))
        if len(history) >= _MAX_PROBES:
            size = posterior.knee(self.section.tolerance, only_measured=True)
            reason = f"stopped after {_MAX_PROBES} probes: {posterior.describe(size)}"
            return BatchSizeChoice(size, reason)
        return self._decide(posterior, self.bounds.smallest_excluded(history))

    def _decide(
        self, posterior: _Posterior, too_large: int | None
    ) -> ProbeRequest | BatchSizeChoice:
        knee = posterior.knee(self.section.tolerance)
        if math.isinf(posterior.error(knee)):
            size = _next_towards(knee, posterior, too_large)
            purpose = "predicted knee" if size == knee else "on the way to the predicted knee"
            return ProbeRequest(size, f"{purpose}: {posterior.describe(knee)}")
        max_loss = _log_loss(_SLACK * self.section.tolerance)
        if (posterior.losses_of(knee) <= max_loss).mean() >= _CONFIDENCE:
            if (smaller := posterior.smaller_to_try(knee, self.section.tolerance)) is None:
                return BatchSizeChoice(knee, posterior.describe(knee))
            reason = f"{smaller} may be fast enough: {posterior.describe(smaller)}"
            return ProbeRequest(smaller, reason)
        competitor = posterior.competitor(knee, max_loss)
        size = max(competitor, knee, key=posterior.error)
        reason = f"is {competitor} faster than {knee}? {posterior.describe(knee)}"
        return ProbeRequest(_next_towards(size, posterior, too_large), reason)


@dataclass(frozen=True)
class _Posterior:
    """Likely curves of samples/s, sampled at the candidate sizes."""

    points: tuple[Point, ...]
    sizes: tuple[int, ...]
    curves: Array  # log of samples/s, [curve, size]

    @property
    def losses(self) -> Array:
        """log(best samples/s / samples/s of the size), [curve, size]."""
        losses: Array = self.curves.max(axis=1, keepdims=True) - self.curves
        return losses

    def losses_of(self, size: int) -> Array:
        """Return the losses of one size, [curve]."""
        return self.losses[:, self.sizes.index(size)]

    def error(self, size: int) -> float:
        """Return the standard error of the log of samples/s; infinite if it was not measured."""
        return next((p.error for p in self.points if p.batch_size == size), math.inf)

    def knee(self, tolerance: float, *, only_measured: bool = False) -> int:
        """Return the smallest size that loses at most `tolerance` on the median curve."""
        # Of each size: the maximum of a single curve, of many uncertain values, is too optimistic.
        median = np.median(self.curves, axis=0)
        if only_measured:
            median[[math.isinf(self.error(size)) for size in self.sizes]] = -np.inf
        good_enough = median >= median.max() - _log_loss(tolerance)
        return self.sizes[int(good_enough.argmax())]

    def smaller_to_try(self, knee: int, tolerance: float) -> int | None:
        """Return the unmeasured size below `knee` with most expected octaves saved, or None."""
        chances = (self.losses <= _log_loss(tolerance)).mean(axis=0)
        octaves = {
            size: chance * math.log2(knee / size)
            for size, chance in zip(self.sizes, chances, strict=True)
            if size < knee and chance >= _MIN_CHANCE and math.isinf(self.error(size))
        }
        return max(octaves, key=lambda size: octaves[size], default=None)

    def competitor(self, knee: int, max_loss: float) -> int:
        """Return the size that most often beats `knee` by more than `max_loss` (a log)."""
        advantage = self.curves - self.curves[:, [self.sizes.index(knee)]]
        return self.sizes[int((advantage > max_loss).mean(axis=0).argmax())]

    def describe(self, size: int) -> str:
        """Say how fast `size` is, with no more confidence than its own probes support."""
        fractions = np.exp(-self.losses_of(size))
        low, median = (100 * float(q) for q in np.quantile(fractions, [1 - _CONFIDENCE, 0.5]))
        if math.isfinite(error := self.error(size)):
            low = min(low, 100 * math.exp(-_ERRORS * error))
        return (
            f"{size} reaches about {median:.1f} % of the best samples/s up to "
            f"{self.sizes[-1]}, with {100 * _CONFIDENCE:.0f} % confidence at least {low:.1f} %"
        )


def _log_loss(fraction: float) -> float:
    return -math.log1p(-min(fraction, 0.99))


def _candidate_sizes(measured: Sequence[int], largest: int) -> tuple[int, ...]:
    """Return powers of two, midpoints from 3 tiles on, measured sizes, and the largest; sorted."""
    # Without 1, unless nothing else fits: BatchNorm1d cannot be trained with one sample.
    powers = {2**i for i in range(1, largest.bit_length())}
    midpoints = {size // 2 * 3 for size in powers if size >= 2 * _TILE}
    ends = {largest} | {largest - largest % tile for tile in (8, _TILE) if largest > tile}
    return tuple(sorted(s for s in powers | midpoints | ends | set(measured) if s <= largest))


def _next_towards(size: int, posterior: _Posterior, too_large: int | None) -> int:
    """Return `size`, or a smaller one to measure first: memory may run out on the way."""
    fits = posterior.points[-1].batch_size
    if size <= fits:
        return size
    if too_large is None:
        return size if size <= _MAX_GROWTH * fits else 2 ** int(math.log2(_MAX_GROWTH * fits))
    middle = math.sqrt(fits * too_large)
    multiple = 8 * round(middle / 8)
    if fits < multiple < too_large:
        return multiple
    return min(max(round(middle), fits + 1), too_large - 1)
