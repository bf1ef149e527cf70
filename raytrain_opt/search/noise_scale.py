"""How noisy gradients are, and what a larger batch costs in samples.

The simple noise scale of McCandlish et al. 2018 (An Empirical Model of Large-Batch Training, arXiv
1812.06162, section 2.2 and appendix A.1).

| symbol | meaning                                                              |
|--------|----------------------------------------------------------------------|
| G, S   | mean and covariance of one sample's gradient at the present weights  |
| b, B   | samples behind a small and a large batch, with gradients g_b and g_B |
| N      | the noise scale, tr S / |G|^2, in samples                            |

As E |g_b|^2 = |G|^2 + tr S / b, and alike for B, unbiased estimates of one update are

    |G|^2 ~ (B |g_B|^2 - b |g_b|^2) / (B - b)    tr S ~ (|g_b|^2 - |g_B|^2) / (1 / b - 1 / B)

Their ratio would be biased and wild: both are averaged over many updates first. For the same
progress, updates of B samples need samples in proportion to 1 + B / N, so B is worth

    goodput(B) = samples/s(B) / (1 + B / N)

(as in Qiao et al., Pollux, OSDI 2021). That is the model; it holds where the learning rate is fit
for the batch, and it knows nothing of how well the trained network generalises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raytrain_opt.train.totals import GradientNorms

# Fewer updates than this tell nothing of their spread.
_LEAST_UPDATES = 4
_NOISELESS = 1e-9  # a noise scale by which can be divided


@dataclass(frozen=True)
class NoiseScale:
    """What some updates say: means of the estimates of |G|^2 and tr S, and of their squares and
    product, from which follows how sure they are. `batch_size`: samples of an update (mean).
    """

    updates: int
    batch_size: float
    gradient_sq: float
    trace: float
    gradient_sq_squared: float
    trace_squared: float
    product: float

    @classmethod
    def of(cls, norms: GradientNorms) -> NoiseScale | None:
        """None where no update is finite (a loss that was scaled too high, a divergence)."""
        b, big = norms.small_batch, norms.big_batch
        found = [
            ((big * whole - b * part) / (big - b), (part - whole) / (1 / b - 1 / big))
            for part, whole in norms.pairs
            if math.isfinite(part) and math.isfinite(whole)
        ]
        if not found:
            return None
        products = [(g, s, g * g, s * s, g * s) for g, s in found]
        return cls(
            len(found), big, *(math.fsum(c) / len(found) for c in zip(*products, strict=True))
        )

    @property
    def value(self) -> float:
        """N in samples; infinite where noise hides the gradient (no estimate of |G|^2 above 0)."""
        return max(self.trace, 0.0) / self.gradient_sq if self.gradient_sq > 0 else math.inf

    @property
    def bounds(self) -> tuple[float, float]:
        """N lies between these with about 95 % (Fieller's interval of a ratio of means).

        The upper one is infinite where the updates do not tell |G|^2 from 0; both say nothing
        (0, inf) of too few updates. Updates that differ because training moves on widen it.
        """
        if self.updates < _LEAST_UPDATES:
            return 0.0, math.inf
        g, s, freedom = self.gradient_sq, self.trace, self.updates - 1
        weight = _student(freedom) ** 2 / freedom
        a = g * g - weight * (self.gradient_sq_squared - g * g)
        half = g * s - weight * (self.product - g * s)
        c = s * s - weight * (self.trace_squared - s * s)
        root = math.sqrt(max(half * half - a * c, 0.0))
        if a > 0 and g > 0:
            return max((half - root) / a, 0.0), max((half + root) / a, 0.0)
        return (half - root) / a if a < 0 < c else 0.0, math.inf

    @property
    def doubling(self) -> float:
        """By which share the samples grow, for the same progress, when the batch is doubled."""
        return self.batch_size / (self.value + self.batch_size)

    @property
    def most_by_doubling(self) -> float:
        """`doubling` at the lower bound of N."""
        return self.batch_size / (self.bounds[0] + self.batch_size)

    def to_record(self) -> dict[str, Any]:
        """For JSON; `from_record` makes the same of it."""
        low, high = self.bounds
        return {"value": self.value, "low": low, "high": high, **asdict(self)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> NoiseScale:
        """The inverse of `to_record`."""
        return cls(**{name: record[name] for name in cls.__dataclass_fields__})

    def __str__(self) -> str:
        """For people."""
        low, high = self.bounds
        if math.isinf(self.value):
            return f"more than can be measured, at least {low:.3g}: noise dominates"
        if self.updates < _LEAST_UPDATES:
            return f"{self.value:.3g} (from {self.updates} updates, a hint only)"
        return f"{self.value:.3g} ({low:.3g} to {'?' if math.isinf(high) else f'{high:.3g}'})"


def pooled(parts: Sequence[NoiseScale]) -> NoiseScale:
    """All updates of the parts together; at least one part."""
    total = sum(part.updates for part in parts)
    names = [name for name in NoiseScale.__dataclass_fields__ if name != "updates"]
    means = (math.fsum(p.updates * getattr(p, name) for p in parts) / total for name in names)
    return NoiseScale(total, *means)


def log_efficiency(noise_scale: float, batch_size: float) -> float:
    """log of 1 / (1 + B / N): the progress of a sample, 0 for a batch far below the noise."""
    return -math.log1p(batch_size / max(noise_scale, _NOISELESS))


def summary(epochs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What the epochs' records (`to_record`) come to, with a sentence; None without records.

    The noise scale grows while training goes on, so each half of the epochs has one, and the
    cost of doubling is their mean: both halves take as many samples.
    """
    found = [NoiseScale.from_record(record) for record in epochs]
    if not found:
        return None
    half = len(found) // 2
    stages = [pooled(part) for part in (found[:half], found[half:]) if part]
    return {
        "stages": [stage.to_record() for stage in stages],
        "doubling_costs": _mean([stage.doubling for stage in stages]),
        "sentence": sentence(stages),
    }


def sentence(stages: Sequence[NoiseScale]) -> str:
    """Whether a larger batch pays, for people. `stages`: of the whole training, or its halves."""
    names = ["first half", "second half"] if len(stages) > 1 else ["training"]
    scales = "; ".join(f"{stage} in the {n}" for stage, n in zip(stages, names, strict=True))
    sizes = {stage.batch_size for stage in stages}
    batch = f"the global batch of {sizes.pop():g}" if len(sizes) == 1 else "the global batch"
    hidden = any(math.isinf(stage.value) for stage in stages)
    costs = [stage.most_by_doubling if hidden else stage.doubling for stage in stages]
    return (
        f"{scales}: doubling {batch} costs {'at most ' if hidden else ''}{_mean(costs):.0%} more "
        "samples for the same progress; it pays where samples/s grow by more"
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _student(freedom: int) -> float:
    """The 97.5 % point of Student's t, to 4 % from 3 degrees of freedom on (Cornish-Fisher)."""
    return 1.96 + 2.37 / freedom + 2.82 / freedom**2
