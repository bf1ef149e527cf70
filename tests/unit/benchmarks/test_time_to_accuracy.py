"""The comparison benchmark: every row is computed and counts what was trained for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import comparison_rows as rows_of
from benchmarks import time_to_accuracy as benchmark
from benchmarks.comparison_kinds import KINDS
from benchmarks.comparison_tasks import SYNTHETIC
from benchmarks.comparison_units import Result, Setting, Unit, compute
from raytrain_opt.results import TrainTotals
from raytrain_opt.train.learner import Learner

OURS = {"policy": "stpt_horizon"}
EPOCHS = 4


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(SYNTHETIC, 0, EPOCHS, SYNTHETIC.prepare(Path(), tmp_path))


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Samples of each phase that a learner trained."""
    samples: list[int] = []

    def count(method: str) -> None:
        original: Callable[[Learner], TrainTotals] = getattr(Learner, method)

        def counted(self: Learner) -> TrainTotals:
            totals = original(self)
            samples.append(totals.samples)
            return totals

        monkeypatch.setattr(Learner, method, counted)

    count("take_totals")
    count("end")
    return samples


def one_training() -> int:
    return EPOCHS * (SYNTHETIC.train + SYNTHETIC.validation)


def computed_here(units: Sequence[Unit], _processes: int) -> Iterator[tuple[Unit, Result]]:
    for unit in units:
        yield unit, compute(unit)


@pytest.mark.parametrize("name", ["ours", "stpt"])
def test_a_row_counts_every_sample_that_was_trained(
    name: str, setting: Setting, trained: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # So short a training has no search, which would lower a start at 10: it diverges.
    monkeypatch.setattr(rows_of, "WRONG_START_FACTOR", 10.0)
    units = rows_of.rows(OURS)[name].units(setting)
    results = [compute(unit) for unit in units]
    assert sum(result["samples"] for result in results) == sum(trained)
    row = rows_of.outcome(rows_of.rows(OURS)[name], results, 0.0, setting.training_samples)
    assert row["trainings"] == sum(trained) / one_training()
    assert sum(trained) >= len(units) * EPOCHS * SYNTHETIC.train
    # Evaluated from the first quarter of the training on.
    evaluated = sum(4 * epoch >= EPOCHS for epoch in range(1, EPOCHS + 1))
    assert all(len(result["curve"]) == evaluated for result in results)
    assert [p["samples"] for p in results[0]["curve"]][-1] == results[0]["samples"]


def test_a_task_with_data_of_its_own_trains(tmp_path: Path) -> None:
    task = replace(KINDS["segmentation@100"], train=96, validation=24, batch=32, epochs=1)
    setting = Setting(task, 0, 1, task.prepare(tmp_path, tmp_path))
    section = {"policy": "schedule", "shape": "constant", "initial": 0.01}
    result = compute(Unit("it", setting, section, holds_out=False))
    assert 0 < result["accuracy"] < 1
    assert result["samples"] == 96
    assert len(result["curve"]) == 1


def test_an_interrupted_comparison_continues_from_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "compute_all", computed_here)
    file = tmp_path / "cache.jsonl"
    options = ["--tasks", "synthetic", "--epochs", "2", "--seeds", "2", "--cache", str(file)]
    arguments = ["time_to_accuracy.py", *options, "--rows", "cosine_default", "linear_default"]
    monkeypatch.setattr(sys, "argv", arguments)
    benchmark.main()
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][: len(lines[-1]) // 2])
    benchmark.main()
    output = capsys.readouterr().out
    second = json.loads(output.splitlines()[-1])
    assert output.count(" trainings, ") == 1  # only the one with half a line left
    accuracies = {n: row["accuracies"] for n, row in first["tasks"]["synthetic"].items()}
    assert {n: row["accuracies"] for n, row in second["tasks"]["synthetic"].items()} == accuracies
    assert accuracies.keys() == {"cosine_default", "linear_default"}
