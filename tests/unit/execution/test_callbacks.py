"""Callbacks of one's own, and MLflow, which is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raytrain_opt import Callback
from raytrain_opt.config.schema import Job
from raytrain_opt.driver import run
from raytrain_opt.errors import DivergedError, JobError
from raytrain_opt.recording.records import EpochRecord, ResultRecord, RoundRecord
from raytrain_opt.storage import last_name
from tests.support.s3_server import S3Server
from tests.support.small_jobs import read_lines, small_job

pytestmark = pytest.mark.usefixtures("without_plots")


class Notes(Callback):
    """Writes what it is called with."""

    def on_round(self, record: RoundRecord) -> None:
        self._add(round=record.epoch)

    def on_epoch(self, record: EpochRecord) -> None:
        self._add(epoch=record.epoch)

    def on_checkpoint(self, folder: str) -> None:
        self._add(checkpoint=Path(folder).name, exists=Path(folder).is_dir())

    def on_end(self, result: ResultRecord | None) -> None:
        self._add(end=result and result.epochs)

    def _add(self, **values: Any) -> None:
        path = Path(self.run_dir) / "notes.jsonl"
        path.write_text((path.read_text() if path.exists() else "") + json.dumps(values) + "\n")


class Broken(Callback):
    """Changes its copy and fails in every epoch."""

    def on_epoch(self, record: EpochRecord) -> None:
        record.test_metrics["accuracy"] = 70.0
        raise RuntimeError("planted failure")


def tiny_job(folder: Path, **changes: Any) -> Job:
    values = {
        "model": {"name": "small_cnn", "args": {"width": 2}},
        "epochs": 2,
        "learning_rate": {"policy": "stpt", "candidates": [1.0, 0.5], "alpha": 3},
        "callbacks": [f"{__name__}:Broken", f"{__name__}:Notes"],
    }
    return small_job(folder, **{**values, **changes})


def test_a_callback_is_called_for_everything_and_a_broken_one_is_noted(tmp_path: Path) -> None:
    result = run(tiny_job(tmp_path), in_process=True)
    notes = read_lines(result.run_dir, "notes")
    assert [note["round"] for note in notes if "round" in note] == [1, 2]
    assert [note["epoch"] for note in notes if "epoch" in note] == [1, 2]
    checkpoints = [note for note in notes if "checkpoint" in note]
    assert checkpoints[-1] == {"checkpoint": "epoch-0002", "exists": True}
    assert len(checkpoints) == 4  # after each round and each epoch
    assert notes[-1] == {"end": 2}
    assert result.test_metric == result.summary.final.test_metrics["accuracy"] <= 1
    [event] = read_lines(result.run_dir, "events")  # once, not in every epoch
    assert event["kind"] == "callback"
    assert "Broken.on_epoch failed (RuntimeError: planted failure)" in event["text"]


def test_the_end_of_a_run_that_failed_has_no_result(tmp_path: Path) -> None:
    diverging = {"policy": "schedule", "shape": "constant", "initial": 1e30}
    job = tiny_job(tmp_path, learning_rate=diverging)
    with pytest.raises(DivergedError):
        run(job, in_process=True)
    [run_dir] = tmp_path.iterdir()
    assert read_lines(str(run_dir), "notes")[-1] == {"end": None}


def test_a_class_that_does_not_exist_is_found_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=rf"callbacks\.0: '{__name__}' has no 'Note'"):
        run(tiny_job(tmp_path, callbacks=[f"{__name__}:Note"]), in_process=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("store", "is_remote"), [("file", True), ("sqlite", False)])
def test_mlflow_has_the_run_and_a_resumed_one_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: S3Server, store: str, is_remote: bool
) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient  # slow to import, and it reads the first variable

    monkeypatch.chdir(tmp_path)  # where MLflow keeps the files of a run in a database
    tracking = {"mlflow": f"{store}:///{tmp_path}/mlflow"}
    changes: dict[str, Any] = {"callbacks": [], "tracking": tracking}
    changes["storage_path"] = s3.new_uri() if is_remote else str(tmp_path / "runs")
    first = run(tiny_job(tmp_path, **changes), in_process=True)
    longer = tiny_job(tmp_path, **changes, epochs=3)
    run(longer, in_process=True, resume=first.run_dir)
    client = MlflowClient(tracking["mlflow"])
    experiment = client.get_experiment_by_name("test")
    [tracked] = client.search_runs([experiment.experiment_id])
    assert tracked.info.status == "FINISHED"
    assert tracked.info.run_name == last_name(first.run_dir)
    assert tracked.data.params["global_batch_size"] == "64"
    accuracies = client.get_metric_history(tracked.info.run_id, "test_accuracy")
    assert [metric.step for metric in accuracies] == [1, 2, 3]
    names = {artifact.path for artifact in client.list_artifacts(tracked.info.run_id)}
    assert names == {"report.html", "result.json"}
