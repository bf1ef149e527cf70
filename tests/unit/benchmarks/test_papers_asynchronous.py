"""The asynchronous paper: the job's own sections, a simulation, an ensemble."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.async_simulation import Costs
from benchmarks.comparison_tasks import SYNTHETIC
from benchmarks.papers import asynchronous


def test_costs_slow_the_simulation_down() -> None:
    first = asynchronous.simulated(0.25, 25.0, Costs())
    assert first[48]["min"] > asynchronous.PAPER["speedup_at_48"]
    costly = asynchronous.simulated(0.25, 25.0, Costs(update_s=1e-8))
    assert costly[48]["max"] < first[48]["min"]


def test_an_ensemble_has_an_error_beside_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asynchronous, "TASK", SYNTHETIC)
    errors = asynchronous.ensembles(Path(), seeds=2, epochs=2)
    assert len(errors["runs"]) == 2
    assert 0 <= errors["ensemble"]["top1_error"] <= 1
