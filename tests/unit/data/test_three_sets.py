"""Image folders with three sets: the best epoch is chosen on one, the last is looked at once."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytrain_opt import load_model, run
from raytrain_opt.commands.evaluate import evaluate_runs, find_run
from raytrain_opt.commands.predict import predict_test_set
from raytrain_opt.config.data import ImageFolderData
from raytrain_opt.data.image_folder import ImageFolderSource, class_folders
from raytrain_opt.execution import result as result_module
from raytrain_opt.execution.training_run import TrainingRun
from raytrain_opt.pools.commands import StateRef
from raytrain_opt.pools.interface import SynchronousTraining
from raytrain_opt.report.run_reader import read_run
from raytrain_opt.report.summary import tiles
from raytrain_opt.results import EvalTotals, Split
from tests.support.small_jobs import read_lines, small_job


def open_source(root: Path, **fields: Any) -> ImageFolderSource:
    return ImageFolderSource(ImageFolderData(name="image_folder", root=str(root), **fields))


@pytest.fixture
def three_sets(image_tree: Path) -> Path:
    """Of the training images, the first three of each class are the folder `test`."""
    for path in sorted(image_tree.glob("train/*/[012].png")):
        target = image_tree / "test" / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    return image_tree


def test_folders_and_splits_of_a_table_are_three_sets(three_sets: Path) -> None:
    folders = open_source(three_sets)
    [note] = folders.notes
    assert note == "test: 6 images are looked at once, at the end"
    for name in ("10", "9"):  # by value
        (three_sets / "numbers" / name).mkdir(parents=True)
    assert class_folders(three_sets / "numbers", Counter()) == ["9", "10"]
    rows = [
        f"{path.relative_to(three_sets)},{path.parent.name},{path.parts[-3]}"
        for path in sorted(three_sets.glob("*/*/*.png"))
    ]
    table = three_sets / "labels.csv"
    table.write_text("\n".join(["file,label,split", *rows]))
    listed = open_source(three_sets, labels=str(table))
    for source in (folders, listed):
        assert [source.size(s) for s in ("train", "test", "final")] == [14, 6, 6]
        assert source.final_size == 6
        assert source.content("final", 0) == (three_sets / "test/cat/0.png").read_bytes()
        assert source.file("test", 5) == "val/dog/2.png"


@pytest.mark.parametrize("damage", ["unlabeled", "other classes", "named as test set"])
def test_another_folder_test_is_no_third_set(three_sets: Path, damage: str) -> None:
    fields = {}
    if damage == "unlabeled":
        (three_sets / "test/cat/0.png").rename(three_sets / "test/0.png")
        for name in ("cat", "dog"):
            shutil.rmtree(three_sets / "test" / name)
    elif damage == "other classes":
        (three_sets / "test/dog").rename(three_sets / "test/wolf")
    else:
        fields = {"test_split": "test"}
    source = open_source(three_sets, **fields)
    assert source.final_size == 0


@pytest.mark.usefixtures("without_plots")
def test_the_best_epoch_is_looked_at_once_and_mistakes_name_their_files(
    three_sets: Path, tmp_path: Path
) -> None:
    (three_sets / "val/cat/0.png").write_bytes(b"damaged")  # so that numbers are not positions
    data = {"name": "image_folder", "root": str(three_sets), "image_size": 8}
    data |= {"loader_workers": 0, "on_unreadable": "skip"}
    schedule = {"policy": "schedule", "initial": 0.3}
    job = small_job(
        tmp_path / "runs", data=data, epochs=3, learning_rate=schedule, global_batch_size=4
    )
    result = run(job, in_process=True)
    assert result.best_epoch is not None
    best = load_model(f"{result.run_dir}/checkpoints/epoch-{result.best_epoch:04}")
    files = sorted(three_sets.glob("test/*/*.png"))
    predicted = best.probabilities(files).argmax(1).tolist()
    names = [best.class_names[number] for number in predicted]
    hits = sum(name == file.parent.name for name, file in zip(names, files, strict=True))
    assert result.summary.final_set["accuracy"] == pytest.approx(hits / 6)
    [evaluated] = evaluate_runs([result.run_dir], ensemble=False).runs
    assert evaluated.changes == ""
    assert evaluated.samples == len(list(predict_test_set(find_run(result.run_dir, False)))) == 6
    assert len(read_lines(result.run_dir, "epochs")) == 3
    phases = [(line["epoch"], line["phase"]) for line in read_lines(result.run_dir, "timeline")]
    expected = [(epoch, name) for epoch in (1, 2, 3) for name in ("main_train", "evaluate")]
    assert [phase for phase in phases if phase[1] != "checkpoint_wait"][:6] == expected
    [tile, *_] = tiles(read_run(result.run_dir))
    assert tile[0] == "Test accuracy"
    assert tile[1] == f"{100 * hits / 6:.2f} %"
    assert tile[2].startswith(f"once, after epoch {result.best_epoch}, which had ")

    record = json.loads((Path(result.run_dir) / "predictions.json").read_text())
    last = load_model(result.run_dir)
    images = [file for file in sorted(three_sets.glob("val/*/*.png")) if "cat/0" not in str(file)]
    predicted = last.probabilities(images).argmax(1).tolist()
    wrong = {
        f"val/{image.parent.name}/{image.name}"
        for image, number in zip(images, predicted, strict=True)
        if last.class_names[number] != image.parent.name
    }
    assert {mistake["file"] for mistake in record["mistakes"]} == wrong
    assert wrong


@pytest.mark.usefixtures("without_plots")
def test_unreadable_samples_of_each_set_are_told(three_sets: Path, tmp_path: Path) -> None:
    for split in ("val", "test"):
        (three_sets / split / "cat/0.png").write_bytes(b"damaged")
    data = {"name": "image_folder", "root": str(three_sets), "image_size": 8, "loader_workers": 0}
    changes = {"data": data | {"on_unreadable": "skip"}, "epochs": 2, "global_batch_size": 4}
    changes["learning_rate"] = {"policy": "schedule", "initial": 0.1}
    result = run(small_job(tmp_path, **changes), in_process=True)
    [first, last] = [event["text"] for event in read_lines(result.run_dir, "events")]
    assert first == "unreadable samples that metrics of the test set lack: 1"
    assert last == first.replace("test", "third")


@pytest.mark.usefixtures("without_plots")
def test_the_first_of_the_best_epochs_is_looked_at_whatever_is_saved(
    three_sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs 2 and 3 are equally good; without the third set epoch 4 alone would be saved."""
    accuracies, sum_up = iter([0.2, 0.6, 0.6, 0.4, 0.5]), SynchronousTraining.evaluate
    looked_at = list[str]()

    def evaluate(training: Any, state: StateRef, split: Split = "test") -> EvalTotals:
        totals = sum_up(training, state, split)
        looked_at.append(f"{split} {state.id}")
        return replace(totals, sums={**totals.sums, "accuracy": next(accuracies) * totals.samples})

    monkeypatch.setattr(SynchronousTraining, "evaluate", evaluate)
    data = {"name": "image_folder", "root": str(three_sets), "image_size": 8}
    schedule = {"policy": "schedule", "initial": 0.1}
    changes = {"data": data | {"loader_workers": 0}, "epochs": 4, "global_batch_size": 4}
    job = small_job(
        tmp_path, **changes, learning_rate=schedule, checkpoint={"every_epochs": 4, "keep": 1}
    )
    result = run(job, in_process=True)
    assert (result.best_epoch, looked_at[-1]) == (2, "final best epoch-0002")


@pytest.mark.usefixtures("without_plots")
def test_without_the_weights_of_the_best_epoch_the_run_ends_and_says_so(
    three_sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(run: TrainingRun) -> dict[str, float]:
        run.wait_for_checkpoint()
        best = run.checkpoints.best
        assert best is not None
        (run.paths.checkpoints / best.folder / "weights.safetensors").write_bytes(b"damaged")
        return evaluate_best(run)

    evaluate_best = result_module.evaluate_best
    monkeypatch.setattr(result_module, "evaluate_best", damage)
    data = {"name": "image_folder", "root": str(three_sets), "image_size": 8, "loader_workers": 0}
    schedule = {"policy": "schedule", "initial": 0.1}
    job = small_job(tmp_path, data=data, epochs=1, global_batch_size=4, learning_rate=schedule)
    result = run(job, in_process=True)
    assert not result.summary.final_set
    [event] = [e for e in read_lines(result.run_dir, "events") if e["kind"] == "lost"]
    assert event["text"].startswith("the third set is not measured: ")
