"""Gradient noise scale: how noisy gradients are, and what a larger batch costs in samples.

The simple noise scale of McCandlish et al. 2018 (An Empirical Model of Large-Batch Training, arXiv
1812.06162, section 2.2 and appendix A.1).

| symbol | meaning                                                              |
|--------|----------------------------------------------------------------------|
| G, S   | mean and covariance of one sample's gradient at the current weights  |
| b, B   | samples behind a small and a large batch, with gradients g_b and g_B |
| N      | the noise scale, tr S / |G|^2, in samples                            |

As E |g_b|^2 = |G|^2 + tr S / b, and alike for B, unbiased estimates of one update are

    |G|^2 ~ (B |g_B|^2 - b |g_b|^2) / (B - b)    tr S ~ (|g_b|^2 - |g_B|^2) / (1 / b - 1 / B)

The ratio of two single estimates is biased and has a large variance, so both are averaged over
many updates first. For the same progress, updates of B samples need a number of samples
proportional to 1 + B / N, so the value of a batch size is

    goodput(B) = samples/s(B) / (1 + B / N)

(as in Qiao et al., Pollux, OSDI 2021). The model assumes a learning rate that suits the batch
size; it does not cover how well the trained network generalizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from statistics import fmean
from typing import Annotated

from pydantic import BeforeValidator, Field, computed_field
from pydantic.dataclasses import dataclass

from raytrain_opt.results import GradientNorms

# Replaces a noise scale of 0 as a divisor.
_NOISELESS = 1e-9

# A record has null for a number that is not finite.
_Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


@dataclass(frozen=True)
class NoiseScale:
    """Gradient noise scale over some updates: the means of the two estimates.

    It is also the form of the noise scale in records.
    """

    updates: Annotated[int, Field(description="Number of updates measured.")]
    batch_size: Annotated[_Number, Field(description="Mean samples of an update.")]
    gradient_sq: Annotated[_Number, Field(description="Mean estimate of |G|^2.")]
    trace: Annotated[_Number, Field(description="Mean estimate of tr S.")]

    @classmethod
    def from_norms(cls, norms: GradientNorms) -> NoiseScale | None:
        """Return the noise scale of norms; None when no update has finite ones (divergence)."""
        b, big = norms.small_batch, norms.big_batch
        estimates = [
            ((big * of_big - b * of_small) / (big - b), (of_small - of_big) / (1 / b - 1 / big))
            for of_small, of_big in norms.pairs
            if math.isfinite(of_small) and math.isfinite(of_big)
        ]
        if not estimates:
            return None
        return cls(len(estimates), big, *map(fmean, zip(*estimates, strict=True)))

    @computed_field(description="Noise scale N in samples; null: infinite, noise dominates.")  # type: ignore[prop-decorator]
    @property
    def value(self) -> float:
        """N in samples; infinite when the estimate of |G|^2 is not above 0."""
        return max(self.trace, 0.0) / self.gradient_sq if self.gradient_sq > 0 else math.inf

    @property
    def sentence(self) -> str:
        """Whether a larger batch pays."""
        is_known = math.isfinite(self.value)
        shown = f"{self.value:.3g}" if is_known else "more than can be measured (noise dominates)"
        # The samples that the same progress needs, when the batch doubles.
        more = self.batch_size / (self.value + self.batch_size)
        return (
            f"{shown}: doubling the global batch of {self.batch_size:g} costs about "
            f"{100 * more:.0f} % more samples for the same progress; it pays when samples/s grow "
            "by more"
        )


def pool_noise_scales(parts: Sequence[NoiseScale]) -> NoiseScale:
    """Return the noise scale over all updates of one or more parts."""
    total = sum(part.updates for part in parts)
    names = [field.name for field in fields(NoiseScale) if field.name != "updates"]
    means = (math.fsum(p.updates * getattr(p, name) for p in parts) / total for name in names)
    return NoiseScale(total, *means)


def log_efficiency(noise_scale: float, batch_size: float) -> float:
    """Return log(1 / (1 + B / N)), the progress per sample; 0 for a batch far below the noise."""
    return -math.log1p(batch_size / max(noise_scale, _NOISELESS))
