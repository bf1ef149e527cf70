"""How samples/s depends on the batch size, learned from few noisy measurements.

A step of b samples costs c whatever b is (launches, update, communication) and k more for each
sample, or each place in a tile: w is b rounded up to whole tiles. Where the two add up the step
takes c + k w seconds; where they overlap, the longer one. So

    log samples/s = level + log(b / w) - log(1 + (h / w) ^ p) / p + deviation,    h = c / k

| symbol    | meaning                                                                      |
|-----------|------------------------------------------------------------------------------|
| h         | size at which both costs are equal: far below it, size is free; above, useless |
| p         | 1: the costs add up; the larger, the more they overlap and the sharper the knee  |
| tile      | samples that are worked on together: sizes that leave one half empty waste time |
| deviation | what real machines do besides: a random walk over log2 b, plus an amount per size |

h, p, tile and the deviation's spread take values on a grid, each weighted by how well it explains
the measurements; level and deviation given them are Gaussian. The result is a set of curves
drawn from that mixture, always the same ones for the same measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raytrain_opt.search.batch_size import Measurement

Array = NDArray[np.float64]

_OVERLAPS = (1.0, 2.0, 4.0, 16.0)
_TILES = (1, 8, 32)
_H_PER_OCTAVE, _H_SMALLEST, _H_BEYOND_LARGEST = 2, 2.0**-6, 2.0**6
# Deviations by 1 % are the rule. Larger ones are believed when the measurements ask for them.
_SPREADS = ((0.01, 0.80), (0.03, 0.15), (0.10, 0.05))
_OCTAVES = 3.0  # over which the deviation forgets
_PER_SIZE = 0.5  # spread of a size's own amount, as a share of the deviation's spread
_LEVEL_SPREAD = 3.0  # of the level around the first measurement: anything goes
_CURVES = 400
_LEAST_ERROR = 5e-3  # no measurement is believed more precisely than this share of it,
_UNKNOWN_ERROR = 0.5  # and this stands for an error that is not known
_TINY = 1e-9  # keeps covariances of equal sizes positive definite


@dataclass(frozen=True)
class Point:
    """All measurements of one size in one: log of samples/s and its standard error."""

    batch_size: int
    log_rate: float
    error: float


def combine(measurements: Sequence[Measurement]) -> list[Point]:
    """One point a size, by inverse variance. Sizes ascend.

    Where repeats differ by more than their errors say, all errors grow to match (the probes'
    errors know nothing of what changes between probes).
    """
    sizes = sorted({m.batch_size for m in measurements})
    groups = [[_point(m) for m in measurements if m.batch_size == size] for size in sizes]
    points = [_weighted_mean(group) for group in groups]
    scale = _disagreement(groups, points)
    return [Point(p.batch_size, p.log_rate, p.error * scale) for p in points]


def _point(m: Measurement) -> Point:
    if not (math.isfinite(m.samples_per_s) and m.samples_per_s > 0):
        raise ValueError(f"batch size {m.batch_size}: samples_per_s is {m.samples_per_s}")
    error = m.samples_per_s_error / m.samples_per_s
    error = max(error, _LEAST_ERROR) if math.isfinite(error) else _UNKNOWN_ERROR
    return Point(m.batch_size, math.log(m.samples_per_s), error)


def _weighted_mean(points: Sequence[Point]) -> Point:
    weights = [p.error**-2 for p in points]
    total = sum(weights)
    log_rate = sum(w * p.log_rate for w, p in zip(weights, points, strict=True)) / total
    return Point(points[0].batch_size, log_rate, total**-0.5)


def _disagreement(groups: Sequence[Sequence[Point]], means: Sequence[Point]) -> float:
    """At least 1: by how much repeats scatter more than their errors say."""
    repeats = sum(len(group) - 1 for group in groups)
    if repeats == 0:
        return 1.0
    scatter = sum(
        ((p.log_rate - mean.log_rate) / p.error) ** 2
        for group, mean in zip(groups, means, strict=True)
        for p in group
    )
    return max(1.0, math.sqrt(scatter / repeats))


def draw_curves(points: Sequence[Point], sizes: Sequence[int]) -> Array:
    """Likely curves: log samples/s, [curve, size]. Needs a point."""
    measured = np.array([p.batch_size for p in points], dtype=np.float64)
    wanted = np.array(sizes, dtype=np.float64)
    shapes_measured, shapes_wanted = _shapes(measured, wanted.max()), _shapes(wanted, wanted.max())
    fits = [
        _fit(spread, points, measured, wanted, shapes_measured, shapes_wanted)
        for spread, _ in _SPREADS
    ]
    log_weights = np.concatenate(
        [
            fit.log_likelihoods + math.log(prior)
            for fit, (_, prior) in zip(fits, _SPREADS, strict=True)
        ]
    )
    return _draw(fits, np.exp(log_weights - log_weights.max()))


def _shapes(sizes: Array, largest: float) -> Array:
    """The model without level and deviation for every tile, p and h: [shape, size]."""
    octaves = math.log2(largest * _H_BEYOND_LARGEST / _H_SMALLEST)
    h = _H_SMALLEST * 2.0 ** np.linspace(0, octaves, 1 + math.ceil(octaves * _H_PER_OCTAVE))
    shapes = []
    for tile in _TILES:
        work = tile * np.ceil(sizes / tile)
        log_ratio = np.log(h[:, None] / work)
        shapes += [np.log(sizes / work) - np.logaddexp(0, p * log_ratio) / p for p in _OVERLAPS]
    return np.concatenate(shapes)


@dataclass(frozen=True)
class _Fit:
    """What follows from the measurements for one spread of the deviation."""

    log_likelihoods: Array  # [shape]
    means: Array  # [shape, size]
    root: Array  # [size, size], times its transpose is the covariance


def _fit(
    spread: float,
    points: Sequence[Point],
    measured: Array,
    wanted: Array,
    shapes_measured: Array,
    shapes_wanted: Array,
) -> _Fit:
    noise = np.diag([p.error**2 for p in points])
    root = np.linalg.cholesky(_covariance(spread, measured, measured) + noise)
    level = points[0].log_rate
    offsets = shapes_measured[:, :1] - level
    left = np.array([p.log_rate for p in points]) - (shapes_measured - offsets)
    scaled = np.linalg.solve(root, left.T)
    gain = np.linalg.solve(root, _covariance(spread, measured, wanted))
    covariance = _covariance(spread, wanted, wanted) - gain.T @ gain
    return _Fit(
        -0.5 * (scaled**2).sum(axis=0) - float(np.log(np.diag(root)).sum()),
        shapes_wanted - offsets + (gain.T @ scaled).T,
        np.linalg.cholesky(covariance + _TINY * np.eye(len(wanted))),
    )


def _covariance(spread: float, a: Array, b: Array) -> Array:
    """Of level and deviation at sizes `a` and `b`: [a, b]."""
    octaves = np.abs(np.log2(a)[:, None] - np.log2(b)[None, :])
    walk = np.exp(-octaves / _OCTAVES) + _PER_SIZE**2 * (octaves == 0)
    covariance: Array = _LEVEL_SPREAD**2 + spread**2 * walk
    return covariance


def _draw(fits: Sequence[_Fit], weights: Array) -> Array:
    """Each member of the mixture as often as its weight says, with fixed random numbers."""
    quantiles = (np.arange(_CURVES) + 0.5) / _CURVES
    members = np.searchsorted(np.cumsum(weights) / weights.sum(), quantiles)
    shapes, sizes = fits[0].means.shape
    normal = np.random.default_rng(0).standard_normal((_CURVES, sizes))
    curves = np.empty((_CURVES, sizes))
    for index, fit in enumerate(fits):
        mine = members // shapes == index
        curves[mine] = fit.means[members[mine] % shapes] + normal[mine] @ fit.root.T
    return curves
