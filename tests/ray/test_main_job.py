"""The main job on a real local Ray: what it decides, records and leaves."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import psutil
import pytest
import ray
import torch

from raytrain_opt import RunResult, load_job, run
from raytrain_opt.commands.doctor.diagnose import diagnose
from raytrain_opt.train.checkpoint import read_index, read_rest, read_weights
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from tests.support.small_jobs import read_lines, small_job, without_times

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def finished(local_ray: None, storage: Path) -> RunResult:
    """One complete run that many tests examine."""
    return run(small_job(storage))


def test_the_winner_is_the_best_score_and_sets_the_next_base(finished: RunResult) -> None:
    rounds = read_lines(finished.run_dir, "rounds")
    assert [line["epoch"] for line in rounds] == [1, 2, 3]
    for line in rounds:
        scores = [candidate["score"] for candidate in line["candidates"]]
        winner = line["candidates"][line["winner"]]
        assert winner["score"] == max(scores)
        assert line["next_base_lr"] == winner["lr"] == line["base_lr"] * winner["multiplier"]
    for line, following in zip(rounds, rounds[1:], strict=False):
        assert following["base_lr"] == line["next_base_lr"]


def test_every_worker_loaded_the_winners_state(finished: RunResult) -> None:
    for line in read_lines(finished.run_dir, "rounds"):
        assert len(line["winner_sha256"]) == 64
        assert line["loaded_sha256"] == [line["winner_sha256"]] * 2


def test_epochs_and_result_agree(finished: RunResult) -> None:
    epochs = read_lines(finished.run_dir, "epochs")
    result = json.loads((Path(finished.run_dir) / "result.json").read_text())
    assert [line["epoch"] for line in epochs] == [1, 2, 3]
    assert all(line["test_samples"] == 359 for line in epochs)
    assert result["final"]["test_accuracy"] == epochs[-1]["test_accuracy"]
    assert result["best"]["test_accuracy"] == max(line["test_accuracy"] for line in epochs)
    assert result["search"]["samples"] == 3 * 5 * 64  # the loser of two candidates
    steps = result["steps_per_epoch"]
    assert result["search"]["fraction_of_training"] == pytest.approx(5 / steps)
    assert 0 < result["time_to_first_step_s"] <= result["wall_s"]
    assert result["versions"]["torch"] == torch.__version__.split("+")[0]


def test_the_noise_scale_of_the_gradients_is_reported(finished: RunResult) -> None:
    epochs = read_lines(finished.run_dir, "epochs")
    assert [line["noise_scale"]["batch_size"] for line in epochs] == [64] * 3
    assert all(line["noise_scale"]["updates"] == 2 for line in epochs)
    noise = finished.summary["noise_scale"]
    assert [stage["updates"] for stage in noise["stages"]] == [2, 4]
    assert "doubling the global batch of 64 costs" in noise["sentence"]


def test_the_schedule_is_the_rate_of_every_step(finished: RunResult) -> None:
    schedule = json.loads((Path(finished.run_dir) / "schedule.json").read_text())
    rounds = read_lines(finished.run_dir, "rounds")
    steps = schedule["epoch_steps"][0]
    assert len(finished.lrs) == schedule["steps"] == 3 * steps
    for number, line in enumerate(rounds):
        lrs = finished.lrs[number * steps : (number + 1) * steps]
        assert set(lrs) == {line["next_base_lr"]}


def test_the_checkpoint_gives_the_recorded_accuracy(finished: RunResult, storage: Path) -> None:
    folder = Path(finished.run_dir) / "checkpoints"
    checkpoints = read_index(folder)
    assert checkpoints[-1].epoch == 3
    learner = Learner(LearnerConfig.from_job(small_job(storage)), None, torch.device("cpu"))
    learner.model.load_state_dict(read_weights(folder / checkpoints[-1].folder))
    assert learner.evaluate("test").accuracy == finished.test_accuracy
    assert read_rest(folder / checkpoints[-1].folder)["progress"]["next_epoch"] == 4


def test_the_resolved_job_and_the_tensorboard_events_are_written(finished: RunResult) -> None:
    folder = Path(finished.run_dir)
    resolved = load_job(folder / "job.yaml")
    assert resolved.model.args == {"width": 8}
    assert any((folder / "tensorboard").glob("events.*"))


def test_the_report_and_the_timeline_are_written(finished: RunResult) -> None:
    page = (Path(finished.run_dir) / "report.html").read_text()
    assert f"{finished.test_accuracy:.2%}".replace("%", " %") in page
    spans = read_lines(finished.run_dir, "timeline")
    commands = [(span["process"], span["command"]) for span in spans if span["epoch"] == 2]
    for pool, command in [("slot", "pretrain"), ("worker", "main_train"), ("worker", "evaluate")]:
        assert {name for name, done in commands if done == command} == {f"{pool} 0", f"{pool} 1"}
    assert ("driver", "checkpoint") in commands
    for span in spans:
        assert 0 <= span["start_s"] <= span["start_s"] + span["duration_s"] <= finished.wall_s
        assert sum(span["timings_s"].values()) <= span["duration_s"]
    assert all(span["memory_mib"] > 10 for span in spans if span["process"] != "driver")


def test_no_file_of_a_run_holds_what_is_secret_in_the_environment(finished: RunResult) -> None:
    secret = os.environ["MY_SECRET_TOKEN"].encode()
    files = [path for path in Path(finished.run_dir).rglob("*") if path.is_file()]
    assert Path(finished.run_dir, "result.json") in files
    assert [path for path in files if secret in path.read_bytes()] == []


def test_nothing_of_ours_stays_alive(finished: RunResult) -> None:
    ours = ("PoolLauncher", "Mailbox", "RayTrainWorker", "ImplicitFunc", "TrainController")
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        titles = {process.name().removeprefix("ray::") for process in _descendants()}
        # All CPUs are free again when the placement groups are gone.
        free = ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"]
        if free and not any(title.startswith(ours) for title in titles):
            return
        time.sleep(0.2)
    pytest.fail(f"still there: {titles}, CPUs free: {free}")


def test_waves_over_one_slot_give_the_same_rounds(finished: RunResult, storage: Path) -> None:
    """Neither several candidates per slot nor a storage URI changes the result."""
    waves = run(small_job(storage, slots={"count": 1}, epochs=2, storage_path=f"file://{storage}"))
    expected = without_times(read_lines(finished.run_dir, "rounds"))[:2]
    rounds_of_waves = without_times(read_lines(waves.run_dir.removeprefix("file://"), "rounds"))
    for line in (*expected, *rounds_of_waves):
        for candidate in line["candidates"]:
            del candidate["slot"]
    assert rounds_of_waves == expected


def test_the_large_batch_kit_trains_together(storage: Path) -> None:
    kit = {
        "optimizer": {"name": "LARS", "args": {"momentum": 0.9, "trust_coefficient": 0.01}},
        "learning_rate": {
            "policy": "schedule",
            "shape": "arc_cotangent",
            "initial": 0.5,
            "scaling": {"reference_batch_size": 32},
        },
        "batch_norm": {"momentum": 0.2, "recalibrate_batches": 4},
        "batch_ramp": {"steps": [{"epoch": 2, "factor": 2}]},
        "parallel": {"gradient_buckets": "growing", "compression": "bf16"},
        "loss": {"name": "cross_entropy", "label_smoothing": 0.1},
    }
    result = run(small_job(storage, **kit))
    first, *later = json.loads((Path(result.run_dir) / "schedule.json").read_text())["epoch_steps"]
    assert later == [first // 2] * 2
    assert max(result.lrs) <= 1.0 < 2 * max(result.lrs)
    assert not (Path(result.run_dir) / "rounds.jsonl").exists()
    assert result.summary["search"]["samples"] == 0
    parallel = result.summary["parallel"]
    assert (parallel["buckets"], parallel["compression"]) == ("growing", "bf16")
    assert parallel["connect_s"] > 0
    assert parallel["first_step_s"] > 0
    assert result.test_accuracy is not None
    assert result.test_accuracy > 0.8


def test_the_doctor_finds_this_machine_fit_or_says_why_not(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(storage.iterdir())
    assert diagnose(small_job(storage), None) == 0
    output = capsys.readouterr().out
    for about in ("Ray", "versions", "storage", "clocks", "start-up", "room", "exchange"):
        assert re.search(rf"│ ok +│ {about} ", output), output
    assert "2 workers on 1 node with gloo" in output
    assert set(storage.iterdir()) == before
    too_large = small_job(storage, workers={"count": 2, "resources": {"CPU": 7}})
    assert diagnose(too_large, None) == 1
    assert re.search(r"│ error +│ room ", capsys.readouterr().out)


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)
