"""How an interrupted run is opened again, before any pool starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from raytrain_opt.clock import monotonic_s
from raytrain_opt.cluster.resources import PoolPlan
from raytrain_opt.config.load import load_job
from raytrain_opt.errors import DataError, JobError, StorageError
from raytrain_opt.execution import session
from raytrain_opt.execution.progress import RunProgress
from raytrain_opt.execution.session import open_run_directory, open_session
from raytrain_opt.execution.signals import StopRequest, Terminated
from raytrain_opt.paths import RunPaths
from raytrain_opt.terminal.progress import Terminal
from raytrain_opt.train.checkpoint import Checkpoints
from raytrain_opt.train.state import TrainingState, capture
from tests.support.s3_server import S3Server
from tests.support.small_jobs import small_job

QUIET = Terminal(Console(quiet=True))


def state_of_a_model() -> TrainingState:
    model = nn.Linear(3, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu")
    return capture(model, optimizer, scaler, copy=True)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return the directory of a run with three checkpoints."""
    state = state_of_a_model()
    run = RunPaths.create(str(tmp_path), "test")
    checkpoints = Checkpoints(run.checkpoints, small_job(tmp_path).checkpoint)
    checkpoints.save(1, state, {}, 0.5)
    checkpoints.save(2, state, {}, 0.6)
    checkpoints.save(2, state, {}, None, rounds=1)
    return run.local


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[PoolPlan]:
    """Replace Ray; return a list with an entry for each planning of pools."""
    planned: list[PoolPlan] = []

    @contextmanager
    def fake_ray(*_: object, **__: object) -> Iterator[bool]:
        yield True

    def plan(*_: object) -> PoolPlan:
        planned.append(PoolPlan(False, 2, 2, {"CPU": 0.6}, 2, {"CPU": 0.4}, 2))
        return planned[-1]

    monkeypatch.setattr(session, "ray_session", fake_ray)
    monkeypatch.setattr(session, "plan_when_there_is_room", plan)
    return planned


def opened(run_dir: Path) -> Checkpoints:
    job = small_job(run_dir.parent)
    with open_session(
        job, address=None, verbose=False, began_s=0.0, resume=str(run_dir)
    ) as opened_session:
        return opened_session.checkpoints


def test_a_signal_does_not_wait_for_data_that_never_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = threading.Event()
    monkeypatch.setattr(session, "_prepare", lambda *_: hung.wait(60))

    def stop(*_: object, **__: object) -> None:
        raise Terminated

    monkeypatch.setattr(session, "ray_session", stop)
    job, start_s = small_job(tmp_path, timeouts={"stop_s": 0.1}), monotonic_s()
    try:
        with (
            pytest.raises(Terminated),
            open_session(job, address=None, verbose=False, began_s=start_s),
        ):
            pass
        assert monotonic_s() - start_s < 30
    finally:
        hung.set()


def test_data_that_never_arrive_end_the_run(
    tmp_path: Path, plans: list[PoolPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = threading.Event()
    monkeypatch.setattr(session, "_prepare", lambda *_: hung.wait(60))
    job = small_job(tmp_path, timeouts={"stop_s": 0.1, "no_progress_s": 0.1})
    message = r"data: not read within 0\.1 s \(timeouts\.no_progress_s\)"
    try:
        with (
            pytest.raises(DataError, match=message),
            open_session(job, address=None, verbose=False, began_s=monotonic_s()),
        ):
            pass
    finally:
        hung.set()
    assert plans == []


@pytest.mark.parametrize("location", ["folder", "URI"])
def test_one_process_at_a_time_has_a_run_directory(
    tmp_path: Path, s3: S3Server, location: str
) -> None:
    storage_path = s3.new_uri() if location == "URI" else f"{tmp_path}/runs"
    job = small_job(tmp_path, storage_path=storage_path)
    with open_run_directory(job, None, QUIET, StopRequest()) as (paths, checkpoints):
        checkpoints.save(1, state_of_a_model(), RunProgress().to_json(), None)
        paths.publish()
        with (
            pytest.raises(JobError, match=rf"another .* is writing.*process {os.getpid()} on"),
            open_run_directory(job, paths.shown, QUIET, StopRequest()),
        ):
            pass
    with open_run_directory(job, paths.shown, QUIET, StopRequest()):
        pass


def test_damaged_checkpoints_are_named_and_the_one_before_is_used(
    run_dir: Path, plans: list[PoolPlan], capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = run_dir / "checkpoints"
    (checkpoints / "epoch-0002-round-01" / "rest.pt").unlink()
    (checkpoints / "epoch-0002" / "weights.safetensors").write_bytes(b"half")
    latest = opened(run_dir).latest
    assert latest is not None
    assert latest.reached == "epoch 1"
    output = capsys.readouterr().out
    assert f"resuming {run_dir}" in output
    assert "the checkpoint after round 1 of epoch 3 is damaged" in output
    assert "rest.pt cannot be read: No such file" in output
    assert "the checkpoint after epoch 2 is damaged" in output
    assert output.count("the one before is used") == 2


@pytest.mark.parametrize(
    ("damaged", "content"),
    [("index.json", b"{"), ("index.json", b'{"checkpoints": []}'), ("*/rest.pt", b"{")],
)
def test_without_a_complete_checkpoint_nothing_starts(
    run_dir: Path, plans: list[PoolPlan], damaged: str, content: bytes
) -> None:
    for file in (run_dir / "checkpoints").glob(damaged):
        file.write_bytes(content)
    with pytest.raises(StorageError, match=r"(?s)(index\.json is|rest\.pt was changed).*new run"):
        opened(run_dir)
    assert plans == []


def test_the_cluster_decides_the_number_of_workers_once(
    tmp_path: Path, plans: list[PoolPlan]
) -> None:
    job = small_job(tmp_path, workers={"threads": 1})
    with open_session(job, address=None, verbose=False, began_s=0.0) as opened_session:
        assert opened_session.job == opened_session.resolved.job
        assert opened_session.job.workers.count == opened_session.plan.workers == 2
        assert load_job(opened_session.paths.job).workers.count == 2


def test_a_driver_starts_ray_before_it_imports_torch() -> None:
    code = "import sys, raytrain_opt.driver; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


HERE = f"process 1 on {socket.gethostname()} since then"


@pytest.mark.parametrize(
    ("holder", "record", "stays"),
    [
        (HERE, None, False),
        (HERE, "rounds.jsonl", True),
        (HERE, "checkpoints/index.json", True),
        (HERE, "batch_size.json", True),
        ("process 1 on another.host since then", None, True),
        ("", None, True),
    ],
)
def test_a_new_run_removes_what_a_killed_one_has_left_without_results(
    tmp_path: Path, holder: str, record: str | None, stays: bool
) -> None:
    killed = RunPaths.create(str(tmp_path), "test").local
    (killed / ".lock").write_text(holder)
    (killed / ".job.yaml.7522.tmp").touch()
    if record is not None:
        (killed / record).touch()
    with open_run_directory(small_job(tmp_path), None, QUIET, StopRequest()):
        assert killed.exists() == stays
