"""The noise scale against problems whose gradient and covariance are known."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from raytrain_opt.results import GradientNorms
from raytrain_opt.search.noise_scale import (
    NoiseScale,
    log_efficiency,
    pool_noise_scales,
)
from tests.support.samples import Samples

RECORD = TypeAdapter(NoiseScale)

WORKERS, BATCH = 4, 16
# |G|^2 = 2 in 40 dimensions, and deviations of one sample's gradient: tr S = 1600, N = 800.
GRADIENT = np.full(40, math.sqrt(2 / 40))
DEVIATIONS = np.sqrt(np.linspace(1, 9, 40) * 1600 / np.linspace(1, 9, 40).sum())


def sampled(updates: int, seed: int = 0, gradient: Any = GRADIENT) -> GradientNorms:
    """Norms as workers measure them: the mean over `BATCH` samples is a normal number."""
    random = np.random.default_rng(seed)
    noise = random.standard_normal((updates, WORKERS, len(GRADIENT))) * DEVIATIONS
    gradients = gradient + noise / math.sqrt(BATCH)
    small = np.square(gradients).sum(axis=2).mean(axis=1)
    complete = np.square(gradients.mean(axis=1)).sum(axis=1)
    pairs = tuple(zip(small.tolist(), complete.tolist(), strict=True))
    return GradientNorms(BATCH, WORKERS * BATCH, pairs)


def exact(
    value: float, gradient_sq: float = 1.0, batch: int = 256, updates: int = 10
) -> NoiseScale:
    """Return an estimate whose measurements do not vary."""
    trace = value * gradient_sq
    pair = (gradient_sq + trace / (batch / 4), gradient_sq + trace / batch)
    return estimated(GradientNorms(batch // 4, batch, (pair,) * updates))


def estimated(norms: GradientNorms) -> NoiseScale:
    noise = NoiseScale.from_norms(norms)
    assert noise is not None
    return noise


class TestEstimate:
    @pytest.mark.slow
    def test_both_parts_are_unbiased(self, samples: Samples) -> None:
        """However few updates: the mean of many short measurements is the truth."""
        estimates = [estimated(sampled(3, seed)) for seed in samples(4000)]
        for values, truth in (
            ([noise.gradient_sq for noise in estimates], 2.0),
            ([noise.trace for noise in estimates], 1600.0),
        ):
            error = np.std(values) / math.sqrt(len(values))
            assert abs(np.mean(values) - truth) < 4 * error
            assert error < 0.2 * truth

    def test_the_value_does_not_depend_on_the_sizes_compared(self) -> None:
        for batch in (8, 64, 4096):
            assert exact(300, 7.0, batch).value == pytest.approx(300)

    def test_an_estimate_below_zero_is_infinite(self) -> None:
        hidden = NoiseScale.from_norms(GradientNorms(8, 16, ((3.0, 1.0),) * 10))
        assert hidden is not None
        assert hidden.gradient_sq < 0
        assert hidden.value == math.inf
        assert "more than can be measured (noise dominates)" in hidden.sentence
        assert "costs about 0 % more" in hidden.sentence

    def test_without_noise_it_is_zero(self) -> None:
        quiet = estimated(GradientNorms(8, 16, ((1.0, 1.0 + 1e-9),) * 10))
        assert quiet.value == 0.0
        assert "costs about 100 % more" in quiet.sentence

    def test_updates_that_are_not_finite_do_not_count(self) -> None:
        """An overflow of scaled losses, whose update was left out as well."""
        norms = sampled(50)
        broken = replace(norms, pairs=((math.inf, math.inf), *norms.pairs, (1.0, math.nan)))
        assert NoiseScale.from_norms(broken) == NoiseScale.from_norms(norms)
        assert NoiseScale.from_norms(replace(norms, pairs=((math.inf, 1.0),))) is None


class TestPooled:
    def test_pooled_parts_give_the_estimate_of_all_updates(self) -> None:
        norms = sampled(1000)
        cuts = [norms.pairs[:7], norms.pairs[7:500], norms.pairs[500:]]
        together = pool_noise_scales([estimated(replace(norms, pairs=cut)) for cut in cuts])
        complete = estimated(norms)
        assert together.updates == 1000
        assert together.value == pytest.approx(complete.value)

    def test_a_record_is_read_back(self) -> None:
        for noise in (estimated(sampled(100)), estimated(sampled(2)), exact(5)):
            text = RECORD.dump_json(noise)
            assert RECORD.validate_json(text) == noise
            value = json.loads(text)["value"]
            assert value == (noise.value if math.isfinite(noise.value) else None)


def test_doubling_costs_what_the_formula_says() -> None:
    """The samples grow from 1 + 256 / 812 to 1 + 512 / 812."""
    assert exact(812).sentence == (
        "812: doubling the global batch of 256 costs about 24 % more samples for the same "
        "progress; it pays when samples/s grow by more"
    )


@pytest.mark.parametrize(
    ("noise_scale", "batch", "efficiency"),
    [(100, 100, 0.5), (100, 300, 0.25), (math.inf, 1e9, 1.0), (1e9, 1, 1.0)],
)
def test_efficiency_is_the_progress_of_a_sample(
    noise_scale: float, batch: float, efficiency: float
) -> None:
    assert math.exp(log_efficiency(noise_scale, batch)) == pytest.approx(efficiency)
