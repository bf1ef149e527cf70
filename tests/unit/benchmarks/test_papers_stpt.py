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


def test_the_papers_own_figures_agree_with_it() -> None:
    paper = {name: figure for name, figure in rows_of.PAPER.items() if figure == figure}
    rows = {name: row(figure, figure) for name, figure in paper.items()}
    claims = [*rows_of.order_claims(rows).values(), rows_of.alpha_claim(rows)]
    assert {claim["agrees"] for claim in claims} == {"yes"}
    assert all(claim["points"] == pytest.approx(claim["paper_points"]) for claim in claims)


def test_the_saving_depends_on_the_way_of_counting() -> None:
    """An epoch of 100 iterations, 8 candidates of 8 and of 100."""
    short = rows_of.Counted(warmup=100, main=300, lost=3 * 7 * 8, repeated=0, searches=3)
    full = rows_of.Counted(warmup=100, main=300, lost=3 * 7 * 100, repeated=0, searches=3)
    savings = rows_of.saving_claims([short], [full])
    assert {way: saving["pct"] for way, saving in savings.items()} == {
        "as_published": 87.5,
        "in_turn": 80.5,
        "side_by_side": 0.0,
    }
    assert [saving["agrees"] for saving in savings.values()] == ["yes", "no", "no"]
    # The paper's count does not depend on alpha; and a repeated round counts.
    assert rows_of.saving_claims([full], [full])["as_published"]["pct"] == 87.5
    repeated = rows_of.Counted(
        warmup=100, main=300, lost=3 * 7 * 8 + 8 * 8, repeated=8, searches=3
    )
    savings = rows_of.saving_claims([repeated], [full])
    assert savings["as_published"]["pct"] < 87.5
    assert savings["in_turn"]["pct"] < 80.5


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
