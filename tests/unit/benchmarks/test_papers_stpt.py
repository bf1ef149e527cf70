"""The paper's experiments: the rows follow the paper, and agreement is judged correctly."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from benchmarks import comparison_command
from benchmarks.comparison_units import Result, Unit, compute
from benchmarks.papers import stpt as benchmark
from benchmarks.papers import stpt_rows as rows_of


def computed_here(units: Sequence[Unit], _processes: int) -> Iterator[tuple[Unit, Result]]:
    for unit in units:
        yield unit, compute(unit)


def row(*accuracies: float) -> dict[str, Any]:
    return {"accuracies": list(accuracies), "highest": list(accuracies)}


def test_the_command_on_synthetic_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(comparison_command, "compute_all", computed_here)
    arguments = ["--full", "--tasks", "synthetic", "--epochs", "1", "--seeds", "1"]
    monkeypatch.setattr(sys, "argv", ["stpt.py", *arguments])
    benchmark.main()
    output = capsys.readouterr().out
    result = json.loads(output.splitlines()[-1])["tasks"]["synthetic"]
    assert result["rows"].keys() == rows_of.PAPER.keys() == rows_of.paper_rows().keys()
    fractions = {name: row["search_fraction"] for name, row in result["rows"].items()}
    assert fractions["reference"] == fractions["reference_loss"] == 0
    # One, two, four and eight of eight iterations; the winner's are no search.
    assert [fractions[name] for name in rows_of.ALPHAS] == [0.875, 1.75, 3.5, 7]
    assert all(row["trainings"] == 1 + fractions[name] for name, row in result["rows"].items())
    assert len(result["claims"]) == len(rows_of.CLAIMS) + 1
    assert result["savings"]["alpha_8"]["as_published"]["pct"] == 87.5
    # An eighth of an epoch: 1 - (1 + 7 / 8) / 8.
    assert result["savings"]["alpha_8"]["in_turn"]["pct"] == pytest.approx(76.562, abs=0.001)
    assert all(f" {row.title} " in output for row in rows_of.paper_rows().values())
