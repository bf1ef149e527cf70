"""A model of samples/s as a function of the batch size, for few noisy measurements.

A step of b samples has a fixed cost c (kernel launches, update, communication) and a cost k for
each sample, padding included: w is b rounded up to a multiple of the tile. If the two costs add
up, the step takes c + k w seconds; if they overlap, the longer of the two. So

    log samples/s = level + log(b / w) - log(1 + (h / w) ^ p) / p + deviation,    h = c / k

| symbol    | meaning                                                                      |
|-----------|------------------------------------------------------------------------------|
| h         | size at which both costs are equal: far below it, size is free; above, useless |
| p         | 1: the costs add up; the larger p, the more they overlap, the sharper the knee |
| tile      | samples that are computed together: a partly filled tile wastes time           |
| deviation | everything else: a random walk over log2 b, plus an amount per size            |

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

from raytrain_opt.results import Probe

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
    for m in measurements:
        if not 0 < m.samples_per_s < math.inf:
            raise ValueError(f"batch size {m.batch_size}: samples_per_s is {m.samples_per_s}")
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
    largest = queried.max()
    measured_shapes, queried_shapes = _shapes(measured, largest), _shapes(queried, largest)
    fits = [
        _fit(spread, prior, points, measured, queried, measured_shapes, queried_shapes)
        for spread, prior in _SPREADS
    ]
    log_weights = np.concatenate([fit.log_weights for fit in fits])
    return _draw(fits, np.exp(log_weights - log_weights.max()))


def _shapes(sizes: Array, largest: float) -> Array:
    """Evaluate the model without level and deviation for each tile, p and h: [shape, size]."""
    octaves = math.log2(largest * _H_BEYOND_LARGEST / _H_SMALLEST)
    h = _H_SMALLEST * 2.0 ** np.linspace(0, octaves, 1 + math.ceil(octaves * _H_PER_OCTAVE))
    shapes = []
    for tile in _TILES:
        w = tile * np.ceil(sizes / tile)
        log_ratio = np.log(h[:, None] / w)
        shapes += [np.log(sizes / w) - np.logaddexp(0, p * log_ratio) / p for p in _OVERLAPS]
    return np.concatenate(shapes)


@dataclass(frozen=True)
class _Fit:
    """The posterior for one spread of the deviation."""

    log_weights: Array  # [shape], of prior and likelihood
    means: Array  # [shape, size]
    root: Array  # [size, size], a Cholesky factor of the covariance


def _fit(
    spread: float,
    prior: float,
    points: Sequence[Point],
    measured: Array,
    queried: Array,
    measured_shapes: Array,
    queried_shapes: Array,
) -> _Fit:
    noise = np.diag([p.error**2 for p in points])
    root = np.linalg.cholesky(_covariance(spread, measured, measured) + noise)
    level = points[0].log_rate
    offsets = measured_shapes[:, :1] - level
    residuals = np.array([p.log_rate for p in points]) - (measured_shapes - offsets)
    scaled = np.linalg.solve(root, residuals.T)
    gain = np.linalg.solve(root, _covariance(spread, measured, queried))
    covariance = _covariance(spread, queried, queried) - gain.T @ gain
    return _Fit(
        math.log(prior) - 0.5 * (scaled**2).sum(axis=0) - float(np.log(np.diag(root)).sum()),
        queried_shapes - offsets + (gain.T @ scaled).T,
        np.linalg.cholesky(covariance + _JITTER * np.eye(len(queried))),
    )


def _covariance(spread: float, a: Array, b: Array) -> Array:
    """Return the covariance of level plus deviation at sizes `a` and `b`: [a, b]."""
    octaves = np.abs(np.log2(a)[:, None] - np.log2(b)[None, :])
    walk = np.exp(-octaves / _OCTAVES) + _PER_SIZE**2 * (octaves == 0)
    covariance: Array = _LEVEL_SPREAD**2 + spread**2 * walk
    return covariance


def _draw(fits: Sequence[_Fit], weights: Array) -> Array:
    """Draw from the mixture's components in proportion to their weights, with a fixed seed."""
    quantiles = (np.arange(_CURVES) + 0.5) / _CURVES
    components = np.searchsorted(np.cumsum(weights) / weights.sum(), quantiles)
    shapes, sizes = fits[0].means.shape
    normal = np.random.default_rng(0).standard_normal((_CURVES, sizes))
    curves = np.empty((_CURVES, sizes))
    for index, fit in enumerate(fits):
        rows = components // shapes == index
        curves[rows] = fit.means[components[rows] % shapes] + normal[rows] @ fit.root.T
    return curves
