"""`run(job, in_process=True)`: the run of a job in this process, with all its files."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from click.testing import CliRunner
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

from raytrain_opt import Callback
from raytrain_opt.cli import main
from raytrain_opt.config.load import load_job
from raytrain_opt.config.schema import Job
from raytrain_opt.driver import run
from raytrain_opt.errors import (
    DataError,
    DivergedError,
    JobError,
    RecordError,
    ResidentError,
    ResourcesError,
)
from raytrain_opt.execution.signals import Terminated
from raytrain_opt.execution.training_run import TrainingRun
from raytrain_opt.paths import ENDING
from raytrain_opt.recording.records import EpochRecord
from raytrain_opt.train.checkpoint import read_index
from tests.support.s3_server import S3Server
from tests.support.small_jobs import read_lines, small_job
from tests.support.synthetic_runs import write_schedule
from tests.support.tensorboard_scalars import read_scalars

pytestmark = pytest.mark.usefixtures("without_plots")

TINY = {"model": {"name": "small_cnn", "args": {"width": 2}}, "epochs": 2}
STPT = {"policy": "stpt", "candidates": [1.0, 0.5], "alpha": 3}


def tiny_job(storage: Path, **changes: Any) -> Job:
    return small_job(storage, **{**TINY, "learning_rate": STPT, **changes})


def test_data_that_differ_in_each_process_are_refused(tmp_path: Path) -> None:
    def unseeded() -> Any:
        x = torch.from_numpy(np.random.default_rng().normal(size=(300, 1, 8, 8)))
        return (TensorDataset(x, torch.arange(300) % 2),) * 2

    with pytest.raises(DataError, match="returns other samples in this process.* a fixed seed"):
        run(tiny_job(tmp_path, data={"name": unseeded, "num_classes": 2}), in_process=True)


def test_a_run_in_one_process_leaves_the_files_of_a_run_on_ray(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(tiny_job(tmp_path, workers={"count": 2}), in_process=True)
    assert not ray.is_initialized()
    out = capsys.readouterr().out
    assert "in one process, without Ray" in out
    assert (len(result.lrs), result.summary.search.rounds) == (
        2 * result.summary.steps_per_epoch,
        2,
    )
    files = {path.name for path in Path(result.run_dir).iterdir()}
    assert {"job.yaml", "rounds.jsonl", "epochs.jsonl"} < files
    assert {"result.json", "report.html", "schedule.jsonl", "checkpoints", "tensorboard"} < files
    assert (Path(result.run_dir) / "checkpoints" / "epoch-0002").is_dir()
    assert result.summary.hardware.workers == result.summary.hardware.slots == 1


def test_the_commands_that_a_run_ends_with_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the packages that every installation has."""
    run(tiny_job(tmp_path), in_process=True)
    monkeypatch.chdir(tmp_path)
    Image.new("L", (8, 8)).save("IMAGE...", "PNG")
    commands = re.findall(r"raytrain-opt (predict .*|export .*)", capsys.readouterr().out)
    assert len(commands) == 2
    for command in commands:
        result = CliRunner().invoke(main, shlex.split(command))
        assert result.exit_code == 0, result.output


def test_a_gpu_that_a_job_needs_and_that_is_not_there_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ResourcesError, match="workers.use_gpu: true, but torch finds no GPU"):
        run(tiny_job(tmp_path, workers={"count": 1, "use_gpu": True}), in_process=True)


def test_a_command_that_was_killed_after_the_result_is_repeated_without_training(
    tmp_path: Path,
) -> None:
    job = tiny_job(tmp_path, resume="auto")
    first = run(job, in_process=True)
    assert not Path(first.run_dir, ENDING).exists()
    Path(first.run_dir, ENDING).touch()
    again = run(job, in_process=True)
    assert (again.run_dir, again.lrs) == (first.run_dir, first.lrs)
    assert len(read_lines(first.run_dir, "epochs")) == 2
    assert run(job, in_process=True).run_dir != first.run_dir


def test_a_resumed_run_computes_with_the_threads_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of threads may change bits, and by the resume others may be as fast."""
    computed: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", computed.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4))
    timed, fast = "raytrain_opt.train.kernels.fewest_fast_threads", [3, 1]
    monkeypatch.setattr(timed, lambda *_: fast.pop(0))
    first = run(tiny_job(tmp_path, epochs=1, workers={"count": 1}), in_process=True)
    assert load_job(Path(first.run_dir, "job.yaml")).workers.threads == 3
    run(tiny_job(tmp_path, epochs=2, workers={"count": 1}), in_process=True, resume=first.run_dir)
    assert computed == [3, 3]
    run(tiny_job(tmp_path, epochs=1, workers={"count": 1}), in_process=True)
    run(tiny_job(tmp_path, epochs=1, workers={"count": 1, "threads": 2}), in_process=True)
    assert computed[2:] == [1, 2]


def test_a_finished_run_is_extended_with_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rates are those of the new length; the steps before are not repeated."""
    cosine: dict[str, Any] = {"learning_rate": {"policy": "schedule", "initial": 0.05}}
    first = run(tiny_job(tmp_path / "a", **cosine), in_process=True)
    longer = run(tiny_job(tmp_path / "b", epochs=4, **cosine), in_process=True)
    command = ["run", "--in-process", "--resume", first.run_dir, "--set", "epochs=4"]
    assert CliRunner().invoke(main, command).exit_code == 0
    lrs = [lr for epoch in read_lines(first.run_dir, "schedule") for lr in epoch["steps"]["lrs"]]
    assert lrs == [*first.lrs, *longer.lrs[len(first.lrs) :]]
    [_, event] = read_lines(first.run_dir, "events")
    assert (event["kind"], event["epoch"]) == ("length", 3)
    assert event["text"] == "the schedule now covers 4 epochs, not 2"
    assert load_job(Path(first.run_dir, "job.yaml")).epochs == 4
    assert json.loads(Path(first.run_dir, "result.json").read_text())["epochs"] == 4
    with pytest.raises(JobError, match="has finished"):
        run(tiny_job(tmp_path / "a", epochs=4, **cosine), in_process=True, resume=first.run_dir)


def test_a_resume_with_other_data_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).random((80, 64), np.float32), np.arange(80) % 4
    files = [tmp_path / name for name in ("x.npy", "y.npy", "test_x.npy", "test_y.npy")]
    for file, array in zip(files, (x, y, x, y), strict=True):
        np.save(file, array)
    paths = [str(file) for file in files]
    data: dict[str, Any] = {"name": "arrays", "train": paths[:2], "test": paths[2:]}
    job = tiny_job(tmp_path / "runs", model=linear, data=data, global_batch_size=8)
    first = run(job, in_process=True)
    folder = Path(first.run_dir)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("[!.]*")}
    np.save(files[1], y[::-1])
    longer = job.model_copy(update={"epochs": 3})
    with pytest.raises(DataError, match=r"data: changed since the checkpoint: .*order"):
        run(longer, in_process=True, resume=first.run_dir)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("[!.]*")} == before
    np.save(files[1], y)
    assert run(longer, in_process=True, resume=first.run_dir).summary.epochs == 3


def test_an_extension_that_is_interrupted_is_an_unfinished_run(tmp_path: Path) -> None:
    first = run(tiny_job(tmp_path), in_process=True)
    longer = tiny_job(tmp_path, epochs=3)

    def stop(*_: object) -> None:
        raise Terminated

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRun, "train_epoch", stop)
        with pytest.raises(Terminated):
            run(longer, in_process=True, resume=first.run_dir)
    assert not Path(first.run_dir, "result.json").exists()
    assert run(longer, in_process=True, resume=first.run_dir).summary.epochs == 3


def test_another_optimizer_of_the_new_length_is_refused(tmp_path: Path) -> None:
    """A short training may have chosen one that is left out of a longer one, by its cost."""
    horizon: dict[str, Any] = {"learning_rate": {"policy": "stpt_horizon"}, "optimizer": "auto"}
    first = run(tiny_job(tmp_path, epochs=1, **horizon), in_process=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raytrain_opt.execution.resolve.why_without_muon", lambda *_: "")
        with pytest.raises(JobError, match="epochs: would continue with SGD after .* Muon"):
            run(tiny_job(tmp_path, **horizon), in_process=True, resume=first.run_dir)


def test_a_run_that_died_before_its_result_was_written_has_the_same(tmp_path: Path) -> None:
    first = run(tiny_job(tmp_path), in_process=True)
    Path(first.run_dir, "result.json").unlink()
    resumed = run(tiny_job(tmp_path), in_process=True, resume=first.run_dir)
    assert resumed.summary.final == first.summary.final


def test_a_run_trains_for_a_time_and_its_lengths_are_replayed(tmp_path: Path) -> None:
    """How long it takes depends on the machine; that the schedule ends with it does not."""
    timed = {"epochs": None, "train_for": "4s", "optimizer": "SGD", "average": None}
    horizon = {"policy": "stpt_horizon", "max_search_cost": 0.5}
    result = run(tiny_job(tmp_path / "a", **timed, learning_rate=horizon), in_process=True)
    epochs = read_lines(result.run_dir, "epochs")
    assert result.summary.epochs == len(epochs) == epochs[-1]["epochs"]
    assert result.lrs[-1] < 0.5 * max(result.lrs) or len(result.lrs) == 1
    assert read_lines(result.run_dir, "events")[0]["kind"] == "length"
    schedule = {"policy": "replay", "schedule": f"{result.run_dir}/schedule.jsonl"}
    fixed = {**timed, "epochs": len(epochs), "train_for": None, "learning_rate": schedule}
    replayed = run(tiny_job(tmp_path / "b", **fixed), in_process=True)
    assert replayed.lrs == result.lrs
    assert replayed.test_metric == result.test_metric


def test_a_timed_run_resumes_with_the_time_that_is_left(tmp_path: Path) -> None:
    timed = {"epochs": None, "train_for": "1h", "optimizer": "SGD"}
    section = {"policy": "schedule", "shape": "linear"}
    target = {"target": 0.0}  # reached after the first epoch
    job = tiny_job(tmp_path, **timed, learning_rate=section, stop=target)
    first = run(job, in_process=True)
    [length, stopped] = read_lines(first.run_dir, "events")
    assert (length["kind"], stopped["kind"]) == ("length", "stopped")
    assert "reached the target, 0" in stopped["text"]
    shorter = job.model_copy(update={"train_for": 0.1, "stop": None})
    resumed = run(shorter, in_process=True, resume=first.run_dir)
    assert resumed.summary.epochs == 2
    assert len(resumed.lrs) == len(first.lrs) + 1  # the time is over
    assert resumed.lrs[-1] == pytest.approx(first.lrs[-1], rel=0.1)
    assert read_scalars(Path(resumed.run_dir) / "tensorboard")["epoch/lr"][0] == len(resumed.lrs)


def linear(num_classes: int) -> nn.Module:
    """Return a network without BatchNorm, which stays as it is at a tiny rate."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))


def test_patience_warns_while_the_rate_decays_and_ends_a_constant_one(tmp_path: Path) -> None:
    stop = {"patience": 1}
    data = {"stop": stop, "epochs": 4, "model": linear}
    for shape, epochs, kind in (("linear", 4, "patience"), ("constant", 2, "stopped")):
        section = {"policy": "schedule", "shape": shape, "initial": 1e-12}
        result = run(tiny_job(tmp_path / shape, **data, learning_rate=section), in_process=True)
        assert result.summary.epochs == epochs
        [event] = read_lines(result.run_dir, "events")
        assert (event["kind"], event["epoch"]) == (kind, 2)


def test_a_report_that_fails_does_not_decide_how_a_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RecordError("events.jsonl, line 1: is damaged")

    monkeypatch.setattr("raytrain_opt.report.read_run", fail)
    result = run(tiny_job(tmp_path), in_process=True)
    assert (Path(result.run_dir) / "result.json").exists()
    assert "cannot be written: events.jsonl, line 1: is damaged" in capsys.readouterr().out


def test_a_run_that_is_stopped_in_its_report_is_unfinished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else `resume: auto` would train it once more from the beginning."""

    def stop(*_: object) -> None:
        raise Terminated

    job = tiny_job(tmp_path, resume="auto")
    with monkeypatch.context() as patch:
        patch.setattr("raytrain_opt.report.read_run", stop)
        with pytest.raises(Terminated):
            run(job, in_process=True)
    result = run(job, in_process=True)
    assert [Path(result.run_dir)] == list(tmp_path.iterdir())


def test_an_optimizer_that_was_chosen_is_recorded_and_replayed_bit_for_bit(tmp_path: Path) -> None:
    muon = {"name": "Muon", "args": {"weight_decay": "auto"}}
    auto = {"name": "auto", "candidates": ["Adagrad", muon]}
    section = {"policy": "stpt_horizon", "max_search_cost": 1.0}
    changes = {"epochs": 16, "global_batch_size": 128}
    job = tiny_job(tmp_path / "a", optimizer=auto, learning_rate=section, **changes)
    searched = run(job, in_process=True)
    rounds = read_lines(searched.run_dir, "rounds")
    raced = {candidate["optimizer"] for line in rounds for candidate in line["candidates"]}
    assert raced == {"Adagrad", "Muon"}
    schedule = str(Path(searched.run_dir) / "schedule.jsonl")
    replay = {"policy": "replay", "schedule": schedule}
    with pytest.raises(JobError, match=r"optimizer: was Muon with weight_decay: auto and lr_m"):
        run(tiny_job(tmp_path / "b", learning_rate=replay, **changes), in_process=True)
    job = tiny_job(tmp_path / "c", optimizer=muon, learning_rate=replay, **changes)
    replayed = run(job, in_process=True)
    decays = [line["weight_decay_factor"] for line in read_lines(searched.run_dir, "epochs")]
    assert decays[0] == 0 < decays[1] < decays[2]
    held_out = [line["steps"]["held_out"] for line in read_lines(searched.run_dir, "schedule")]
    assert held_out == [143] * 8 + [0] * 8  # a tenth of the digits
    file = "checkpoints/epoch-0016/weights.safetensors"
    weights = [(Path(r.run_dir) / file).read_bytes() for r in (searched, replayed)]
    assert weights[0] == weights[1]


def test_weights_that_the_last_step_of_an_epoch_destroys_are_not_saved(tmp_path: Path) -> None:
    """The training loss, measured before that step, does not show it."""
    schedule, steps = tmp_path / "schedule.jsonl", 22
    good = [0.1] * steps
    write_schedule(schedule, good, [*good[1:], 1e38], good)
    replay = {"policy": "replay", "schedule": str(schedule)}
    job = tiny_job(tmp_path / "runs", epochs=3, learning_rate=replay, optimizer="SGD")
    message = "epoch 2: the test loss is .*the last checkpoint is after epoch 1"
    with pytest.raises(DivergedError, match=message):
        run(job, in_process=True)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert [checkpoint.epoch for checkpoint in read_index(run_dir / "checkpoints")] == [1]


def test_a_training_that_collapses_at_every_rate_ends_with_what_to_do(tmp_path: Path) -> None:
    fragile = {"name": "tests.support.broken_parts:Fragile", "args": {"limit": 0.0}}
    search = {"policy": "stpt_horizon", "max_search_cost": 1.0}
    job = tiny_job(
        tmp_path, epochs=8, global_batch_size=128, optimizer=fragile, learning_rate=search
    )
    with pytest.raises(DivergedError, match="epoch 6: .*learning_rate.policy: schedule"):
        run(job, in_process=True)
    (run_dir,) = tmp_path.iterdir()
    kinds = [event["kind"] for event in read_lines(str(run_dir), "events")]
    assert kinds == ["collapsed", "collapsed", "failed"]


class StopInCallback(Callback):
    """Sends SIGTERM while it takes an epoch."""

    def on_epoch(self, record: EpochRecord) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_an_epoch_whose_callback_is_interrupted_is_saved(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, callbacks=[f"{__name__}:StopInCallback"])
    with pytest.raises(Terminated):
        run(job, in_process=True)
    (run_dir,) = tmp_path.iterdir()
    assert read_index(run_dir / "checkpoints")[-1].folder == "epoch-0001"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": {"mode": "async"}}, r"parallel\.mode: .*several processes.*--in-process"),
        (
            {"batch_size_search": {"strategy": "throughput_knee"}},
            r"batch_size_search: .*global_batch_size",
        ),
    ],
)
def test_a_job_that_needs_several_processes_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=message):
        run(tiny_job(tmp_path, **changes), in_process=True)
    assert not any(tmp_path.iterdir())


def test_a_job_that_does_not_fit_its_data_leaves_nothing_under_a_uri(s3: S3Server) -> None:
    job = tiny_job(Path(), storage_path=s3.new_uri(), global_batch_size=2048)
    with pytest.raises(JobError, match="global_batch_size"):
        run(job, in_process=True)
    assert not s3.requests


class FailsLater(nn.Module):
    """Raises in the third training step."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.out = nn.Linear(64, num_classes)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        if self.steps > 2:
            raise KeyError("no third step")
        output: torch.Tensor = self.out(x.flatten(1))
        return output


def test_an_exception_of_a_network_names_its_line_and_the_step(tmp_path: Path) -> None:
    schedule = {"policy": "schedule", "initial": 0.1}
    job = tiny_job(tmp_path, model={"name": FailsLater}, learning_rate=schedule)
    place = r"test_in_process.py:\d+ in forward, after 2 steps of epoch 1 in main_train"
    with pytest.raises(ResidentError, match=f"worker 0: KeyError: 'no third step'; at .*{place}"):
        run(job, in_process=True)
