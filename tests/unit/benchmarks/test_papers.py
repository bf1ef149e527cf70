"""The papers' trainings, scaled down: jobs of every row, cached results, ensembles, searches."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from benchmarks.comparison_tasks import SYNTHETIC
from benchmarks.comparison_units import Cache
from benchmarks.papers import asynchronous, large_batch, mbso, stpt, survey
from raytrain_opt.results import Probe

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


def test_an_ensemble_has_an_error_beside_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asynchronous, "TASK", SYNTHETIC)
    errors = asynchronous.ensembles(Path(), seeds=2, epochs=2)
    assert len(errors["runs"]) == 2
    assert 0 <= errors["ensemble"]["metrics"]["top1_error"] <= 1


IMAGES = 8


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write a set like Imagenette's, and the files of it."""
    root = tmp_path_factory.mktemp("root")
    random, blob, ends = np.random.default_rng(0), b"", []
    for _ in range(IMAGES):
        content = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (24, 24, 3), np.uint8)).save(content, "JPEG")
        blob += content.getvalue()
        ends.append(len(blob))
    (root / "small").mkdir()
    labels = np.arange(IMAGES) % 2
    np.savez(
        root / "small" / "imagenette224_small.npz",
        train_blob=np.frombuffer(blob, np.uint8),
        train_ends=ends,
        train_y=labels,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mbso, "JPEG_FILES", IMAGES)
        yield mbso.write_jpegs(root, root / "imagenet")


@pytest.fixture(scope="module")
def probed(files: Path) -> mbso.Probed:
    return mbso.Probed(mbso.PATTERNS[3], {"root": str(files)})


def test_a_search_takes_the_published_steps(
    probed: mbso.Probed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The positive step grows by one a loop: 32, 34, 37, 41."""
    data = probed.learner.data
    monkeypatch.setattr(data, "info", replace(data.info, train_size=1000))
    monkeypatch.setattr(
        mbso.Probed, "probe", lambda _self, size, _job: Probe(size, "ok", samples_per_s=size)
    )
    probes = probed.search("epoch_time_minimize", 32, 4)
    assert [probe.batch_size for probe in probes[:4]] == [32, 34, 37, 41]
    assert mbso._shorter_pct(probes) == pytest.approx(100 * (1 - 32 / probes[-1].batch_size), 0.01)
