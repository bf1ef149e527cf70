"""The papers' trainings: every row is a shipped job, scaled down; results are cached."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.common import JOBS
from benchmarks.comparison_tasks import SYNTHETIC
from benchmarks.comparison_units import Cache
from benchmarks.papers import large_batch, survey
from benchmarks.papers.trainings import accuracies, train_missing
from raytrain_opt.config.load import load_job
from raytrain_opt.models import build_model
from raytrain_opt.optim.epoch_steps import epoch_steps

DATA = {"name": "digits"}


@pytest.mark.parametrize("row", large_batch.ROWS)
@pytest.mark.parametrize("batch", large_batch.BATCHES)
def test_every_row_is_a_job_at_every_batch(row: str, batch: int) -> None:
    training = large_batch.training(row, batch, seed=1)
    job = training.job(DATA)
    assert (job.seed, job.epochs, job.name) == (1, 12, "imagenet-resnet50-81920")
    assert job.global_batch_size == (batch // 4 if row == "growing" else batch)
    assert job.batch_size_per_worker <= 128


def test_rates_follow_the_rules_of_the_jobs() -> None:
    rates = {
        (row, batch): large_batch.training(row, batch, 0).job(DATA).learning_rate.model_dump()
        for row in ("unscaled", "sgd", "arc_cotangent", "muon")
        for batch in (128, 1024)
    }
    initial = {key: section["initial"] for key, section in rates.items()}
    assert initial["unscaled", 128] == initial["unscaled", 1024] == 0.1
    assert initial["sgd", 1024] == pytest.approx(1.6)
    assert initial["arc_cotangent", 1024] == pytest.approx(29 * (1024 / 32768) ** 0.5)
    assert initial["muon", 128] == initial["muon", 1024]


def test_a_training_is_computed_once(tmp_path: Path) -> None:
    task = replace(SYNTHETIC, validation=0)
    training = replace(large_batch.training("sgd", 32, 0), task=task, epochs=12)
    cache = Cache([], tmp_path / "cache.jsonl")
    train_missing([training], cache, tmp_path, tmp_path)
    result = cache[training]
    again = Cache([tmp_path / "cache.jsonl"], None)
    train_missing([training], again, tmp_path, tmp_path)
    assert again[training]["seconds"] == result["seconds"]  # not trained again
    table = accuracies([training, replace(training, seed=1)], again)
    assert (table["seeds"], table["mean"]) == (1, pytest.approx(100 * result["accuracy"]))


def test_a_training_has_its_curve_and_its_accuracy_on_training_images(tmp_path: Path) -> None:
    [first, *_] = survey.equal_steps((32,), 1)
    training = replace(first, task=replace(SYNTHETIC, validation=0))
    cache = Cache([], None)
    train_missing([training], cache, tmp_path, tmp_path)
    result = cache[training]
    assert len(result["curve"]) == training.epochs
    assert result["curve"][-1]["loss"] < result["curve"][0]["loss"]
    row = accuracies([training], cache)
    assert row["gap"] == pytest.approx(
        100 * (result["train_accuracy"] - result["accuracy"]), abs=0.01
    )
    assert row["noise_scale"] == pytest.approx(0.1 * SYNTHETIC.train / 32)


def test_the_perceptron_has_the_surveys_size() -> None:
    training = survey.perceptron(0)
    job = training.job(DATA)
    assert (job.epochs, training.task.train, job.global_batch_size) == (20, 50_000, 100)
    model = build_model(job.model, num_classes=10, sample_shape=(28, 28, 1), seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 89_610


def test_rows_of_equal_steps_have_equally_many_updates() -> None:
    planned = survey.equal_steps(survey.EQUAL_BATCHES, 1)
    assert {t.epochs * (t.task.train // t.batch) for t in planned} == {survey.EQUAL_STEPS}
    rates = {(t.row, t.batch): t.job(DATA).learning_rate.model_dump() for t in planned}
    for batch in survey.EQUAL_BATCHES:
        assert rates["equal_fixed", batch]["initial"] == 0.1
        assert rates["equal_scaled", batch]["initial"] == pytest.approx(0.1 * batch / 64)


@pytest.mark.parametrize("module", [large_batch, survey])
def test_the_commands_show_the_papers_figures_and_draw(
    module: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, plot = tmp_path / "cache.jsonl", tmp_path / "plot.png"
    point = {"accuracy": 0.5, "loss": 1.0}
    result = {"train_accuracy": 0.75, "peak_lr": 0.1, "diverged": "", "seconds": 1.0}
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


def test_the_job_of_the_large_batch_has_1440_updates() -> None:
    """16 in each of 90 epochs of ImageNet's 1,281,167 images."""
    job = load_job(JOBS / large_batch.FILE)
    steps = epoch_steps(1_281_167, job.global_batch_size, drop_last=job.data.drop_last)
    assert job.epochs == 90
    assert [steps(epoch) for epoch in range(1, 91)] == [16] * 90
