"""The papers' trainings: every row is a shipped job, scaled down; results are cached."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.comparison_tasks import SYNTHETIC
from benchmarks.comparison_units import Cache
from benchmarks.papers import large_batch
from benchmarks.papers.trainings import accuracies, train_missing

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
