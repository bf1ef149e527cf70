"""ThroughputKnee and its model against machines whose true cost is known."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import pytest

from raytrain_opt.config.batch_size import ThroughputKneeSearch
from raytrain_opt.errors import ResourcesError
from raytrain_opt.results import Probe
from raytrain_opt.search.batch_size.strategy import (
    BatchSizeChoice,
    ProbeRequest,
    SizeBounds,
    Strategy,
)
from raytrain_opt.search.batch_size.throughput_knee import combine, draw_curves
from raytrain_opt.search.factory import build_strategy
from tests.support.samples import Samples
from tests.support.simulated_machine import Curve, Machine, random_machine

WIDE = SizeBounds(largest=4096, epoch_samples=50_000)


def throughput_knee(bounds: SizeBounds = WIDE, **section: Any) -> Strategy:
    values = {"strategy": "throughput_knee", **section}
    return build_strategy(ThroughputKneeSearch.model_validate(values), bounds)


def searched(machine: Machine, **section: Any) -> BatchSizeChoice:
    return machine.search(throughput_knee(machine.bounds, **section))


@pytest.mark.slow
class TestRandomMachines:
    def test_a_search_is_short_and_near_the_best(self, samples: Samples) -> None:
        near, probes, ratios = [], [], []
        for seed in samples(250):
            machine = random_machine(seed)
            choice = searched(machine)
            near.append(machine.regret(choice) <= 0.03)
            probes.append(len(machine.history))
            ratios.append(choice.batch_size / machine.knee(0.02))
            fits = unfit = math.inf
            for probe in machine.history:
                # Growth is at most fourfold; nothing is probed beyond what did not fit.
                assert probe.batch_size < unfit
                assert probe.batch_size <= 4 * fits
                if not probe.fits:
                    unfit = probe.batch_size
                else:
                    fits = probe.batch_size if fits == math.inf else max(fits, probe.batch_size)
        assert np.mean(near) >= 0.95
        assert median(probes) <= 8
        assert max(probes) <= 12
        # Being fast by taking the largest size is no art.
        assert median(ratios) <= 1.25
        assert np.mean([ratio <= 2 for ratio in ratios]) >= 0.8

    def test_other_kinds_of_machines(self, samples: Samples) -> None:
        """A jump that no model foresees, or a steep decline."""
        near = []
        for seed in samples(60):
            machine = random_machine(1000 + seed)
            jump = {"jump": 50 + 5 * seed, "jump_gain": 1.3}
            decline = {"cache": 32 + 3 * seed, "decline": 0.15}
            curve = replace(machine.curve, **(decline if seed % 2 else jump))
            other = replace(machine, curve=curve, history=[])
            near.append(other.regret(searched(other)) <= 0.03)
        assert np.mean(near) >= 0.9


class TestDecisions:
    @pytest.mark.parametrize(
        ("curve", "largest", "noise", "low", "high"),
        [
            (Curve(half=0.01), 4096, 0.002, 1, 8),  # flat
            (Curve(half=4.0), 4096, 0.002, 96, 256),  # truly 187
            (Curve(half=50.0, overlap=30.0), 4096, 0.002, 64, 128),  # a sharp knee, truly at 52
            (Curve(half=0.1, tile=32), 4096, 0.003, 32, 32),
            (Curve(half=8.0, tile=8), 27, 0.005, 24, 24),  # 27 leaves a tile half empty
            (Curve(half=16.0, overlap=4.0, cache=64.0, decline=0.2), 4096, 0.003, 32, 64),
        ],
    )
    def test_the_knee_of_a_curve_is_found(
        self, curve: Curve, largest: int, noise: float, low: int, high: int
    ) -> None:
        machine = Machine(curve, SizeBounds(largest, 50_000), noise=noise)
        assert low <= searched(machine).batch_size <= high
        assert high > 8 or len(machine.history) <= 8

    def test_size_for_free_takes_the_largest(self) -> None:
        machine = Machine(Curve(half=1e6), WIDE, noise=0.005)
        assert searched(machine).batch_size == 4096
        assert machine.sizes == [32, 128, 512, 2048, 4096]

    def test_a_wider_tolerance_takes_a_smaller_size(self) -> None:
        machine = Machine(Curve(half=4.0), WIDE, noise=0.002)
        chosen = [
            searched(machine.fresh(), tolerance=t).batch_size for t in (0.01, 0.02, 0.05, 0.2)
        ]
        assert chosen == sorted(chosen, reverse=True)
        assert chosen[0] >= 8 * chosen[-1]

    def test_noise_is_met_with_repeats(self) -> None:
        quiet, loud = (
            [
                len(machine.history)
                for seed in range(9)
                for machine in [Machine(Curve(half=2.0), WIDE, noise=noise, seed=seed)]
                if searched(machine)
            ]
            for noise in (0.002, 0.02)
        )
        assert median(loud) > median(quiet)

    def test_twelve_probes_bound_the_search(self) -> None:
        machine = Machine(Curve(half=1.0), WIDE, noise=0.3)
        choice = searched(machine)
        assert len(machine.history) == 12
        assert "stopped after 12 probes" in choice.reason


class TestMemory:
    @pytest.mark.parametrize("memory", [1, 3, 13, 31, 32, 33, 100, 1000, 3001])
    def test_size_for_free_takes_nearly_all_memory(self, memory: int) -> None:
        machine = Machine(Curve(half=1e6), WIDE, memory, noise=0.005)
        choice = searched(machine)
        assert 0.97 * memory <= choice.batch_size <= memory

    def test_the_end_of_memory_is_not_searched_for_where_size_gains_nothing(self) -> None:
        machine = Machine(Curve(half=0.05), WIDE, memory=100, noise=0.003)
        assert searched(machine).batch_size <= 8
        assert sum(not m.fits for m in machine.history) <= 2

    def test_not_even_one_sample_fits(self) -> None:
        machine = Machine(Curve(half=1.0), WIDE, memory=0)
        with pytest.raises(ResourcesError, match="not even a batch of one"):
            searched(machine)
        assert machine.sizes == [32, 16, 8, 4, 2, 1]

    @pytest.mark.parametrize("largest", [1, 2, 3, 5, 31])
    def test_a_start_beyond_the_limit_is_cut(self, largest: int) -> None:
        machine = Machine(Curve(half=1e6), SizeBounds(largest, 100), noise=0.005)
        assert searched(machine).batch_size == largest
        assert machine.sizes[0] == largest
        assert len(machine.sizes) <= 2

    def test_a_start_that_does_not_fit_is_halved_whatever_the_limit(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("raytrain_opt.search.batch_size.throughput_knee._MAX_PROBES", 1)
        machine = Machine(Curve(half=1.0), WIDE, memory=10, noise=0.005)
        assert searched(machine).batch_size == 8
        assert machine.sizes == [32, 16, 8]

    def test_a_size_that_no_longer_fits_is_not_chosen(self) -> None:
        """Memory may be taken by others between two probes of a size."""
        fits = [Probe(size, "ok", 1000.0, 1.0) for size in (32, 128)]
        history = [*fits, Probe(32, "out_of_memory")]
        assert throughput_knee().propose(history) == ProbeRequest(
            16, "half of 32, which did not fit"
        )


class TestModel:
    def test_repeats_count_by_their_inverse_variance(self) -> None:
        history = [Probe(8, "ok", 100.0, 1.0), Probe(8, "ok", 102.0, 2.0)]
        (point,) = combine(history)
        weight = (2.0 / 102.0) ** 2 / ((1.0 / 100.0) ** 2 + (2.0 / 102.0) ** 2)
        expected = weight * math.log(100.0) + (1 - weight) * math.log(102.0)
        assert point.log_rate == pytest.approx(expected)
        assert point.error == pytest.approx(((1 / 0.01) ** 2 + (102 / 2) ** 2) ** -0.5)

    def test_repeats_that_disagree_widen_all_errors(self) -> None:
        other = Probe(16, "ok", 150.0, 1.5)
        agree = [Probe(8, "ok", 100.0, 1.0), Probe(8, "ok", 100.0, 1.0), other]
        differ = [Probe(8, "ok", 80.0, 0.8), Probe(8, "ok", 120.0, 1.2), other]
        narrow, wide = combine(agree)[1], combine(differ)[1]
        assert narrow.error == pytest.approx(0.01)
        assert wide.error > 10 * narrow.error

    @pytest.mark.parametrize("error", [0.0, math.nan])
    def test_no_measurement_is_exact(self, error: float) -> None:
        assert combine([Probe(8, "ok", 100.0, error)])[0].error > 0

    @pytest.mark.parametrize("half", [0.5, 10.0, 200.0])
    def test_curves_cover_the_truth_between_and_beyond_measurements(self, half: float) -> None:
        curve = Curve(half)
        measured = (16, 64, 256)
        rates = [curve.samples_per_s(s) for s in measured]
        history = [
            Probe(size, "ok", rate, 0.005 * rate)
            for size, rate in zip(measured, rates, strict=True)
        ]
        sizes = [32, 128, 512]
        truth = [math.log(curve.samples_per_s(s)) for s in sizes]
        low, high = np.quantile(draw_curves(combine(history), sizes), [0.02, 0.98], axis=0)
        assert (low < truth).all()
        assert (truth < high).all()
        assert (high - low)[0] < math.log(2) / 2  # twice the size is at most twice as fast
