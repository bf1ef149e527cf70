"""The papers' trainings: every row is a shipped job, scaled down; results are cached."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.comparison_units import Cache
from benchmarks.papers import large_batch, stpt, survey

DATA = {"name": "digits"}


def test_every_row_of_stpt_is_a_job() -> None:
    jobs = {row: stpt.training(row, 40, seed=0).job(DATA) for row in stpt.rows(40)}
    assert jobs.keys() >= stpt.PAPER.keys()
    alphas = [jobs[f"alpha_{pct}"].learning_rate.model_dump()["alpha"] for pct in (8, 25, 100)]
    assert alphas == [0.08, 0.25, 1.0]
    assert jobs["local"].workers.count == 8


@pytest.mark.parametrize("module", [large_batch, survey])
def test_the_commands_show_the_papers_figures_and_draw(
    module: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, plot = tmp_path / "cache.jsonl", tmp_path / "plot.png"
    point = {"accuracy": 0.5, "loss": 1.0}
    counts = {"samples": 100, "search_samples": 0}
    result = {**counts, "train_accuracy": 0.75, "peak_lr": 0.1, "diverged": "", "seconds": 1.0}
    cache = Cache([], file)
    for row in ("warmup", "arc_cotangent"):
        for seed, accuracy in enumerate((0.4, 0.5)):
            planned = large_batch.training(row, 1024, seed)
            cache.add(planned, {**result, "accuracy": accuracy, "curve": [point] * 12})
    options = ["--quick", "--seeds", "2", "--cached", "--cache", str(file), "--plot", str(plot)]
    monkeypatch.setattr(sys, "argv", ["paper", *options])
    module.main()
    *_, line, last = capsys.readouterr().out.splitlines()
    shown = [row for row in json.loads(last)["rows"] if row["seeds"]]
    assert {(row["mean"], row["min"], row["max"]) for row in shown} == {(45.0, 40.0, 50.0)}
    assert {row["row"]: row["paper"] for row in shown}.items() <= {
        "warmup": module.PAPER.get("warmup"),
        "arc_cotangent": module.PAPER.get("arc_cotangent"),
    }.items()
    assert "45.00" in line
    assert plot.read_bytes().startswith(b"\x89PNG")
