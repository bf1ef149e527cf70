"""The asynchronous paper: an ensemble beside its members."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.comparison_tasks import SYNTHETIC
from benchmarks.papers import asynchronous


def test_an_ensemble_has_an_error_beside_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asynchronous, "TASK", SYNTHETIC)
    errors = asynchronous.ensembles(Path(), seeds=2, epochs=2)
    assert len(errors["runs"]) == 2
    assert 0 <= errors["ensemble"]["metrics"]["top1_error"] <= 1
