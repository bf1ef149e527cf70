"""The asynchronous paper: the job's own sections, a simulation that repeats, an ensemble."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import ensemble
from benchmarks.async_simulation import Costs
from benchmarks.comparison_tasks import SYNTHETIC
from benchmarks.papers import asynchronous


def test_the_simulation_repeats_exactly_and_costs_slow_it_down() -> None:
    first, again = (asynchronous.simulated(0.25, 25.0, Costs()) for _ in range(2))
    assert first == again
    assert first[48]["min"] > asynchronous.PAPER["speedup_at_48"]
    costly = asynchronous.simulated(0.25, 25.0, Costs(update_s=1e-8))
    assert costly[48]["max"] < first[48]["min"]


def test_the_small_network_keeps_the_jobs_sections() -> None:
    job, small = asynchronous.job_of(4), asynchronous.job_of(4, *asynchronous.SMALL_NETWORK)
    assert (small.parallel.mode, small.parallel.compression) == ("async", "bf16")
    assert (small.optimizer, small.batch_size_per_worker) == (job.optimizer, 32)


def test_an_ensemble_has_an_error_beside_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ensemble, "TASK", SYNTHETIC)
    rates = asynchronous.ensembles(Path(), seeds=2, epochs=2)["top1_error"]
    assert len(rates["members"]) == 2
    assert 0 <= rates["ensemble"] <= 100
