"""What is opened around a run, and how an interrupted run is opened again."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raytrain_opt import Job
from raytrain_opt.clock import monotonic_s
from raytrain_opt.cluster.resources import PoolPlan
from raytrain_opt.config.load import load_job
from raytrain_opt.driver import open_run
from raytrain_opt.errors import DataError, StorageError
from raytrain_opt.execution import on_ray
from raytrain_opt.execution.on_ray import RayBackend
from raytrain_opt.execution.progress import Startup
from raytrain_opt.execution.resolve import Resolved
from raytrain_opt.execution.signals import StopRequest, Terminated
from raytrain_opt.execution.workspace import Frontend, Workspace, open_workspace
from raytrain_opt.paths import RunPaths
from raytrain_opt.terminal import Terminal
from raytrain_opt.train.checkpoint import Checkpoints, Point
from raytrain_opt.train.state import TrainingState, capture
from tests.support.small_jobs import small_job


def workspace_of(job: Job, resume: str | None = None) -> AbstractContextManager[Workspace]:
    frontend = Frontend(Terminal(), StopRequest(), Startup(0.0))
    return open_workspace(job, frontend, resume)


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
    checkpoints.save(Point(1), state, {}, 0.5)
    checkpoints.save(Point(2), state, {}, 0.6)
    checkpoints.save(Point(2, rounds=1), state, {}, None)
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

    monkeypatch.setattr(on_ray, "ray_session", fake_ray)
    monkeypatch.setattr(on_ray, "plan_when_there_is_room", plan)
    return planned


def read_nothing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let data never arrive, until the event."""
    hung = threading.Event()
    monkeypatch.setattr(RayBackend, "_read", lambda _: hung.wait(60))
    return hung


def test_a_signal_does_not_wait_for_data_that_never_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = read_nothing(monkeypatch)

    def stop(*_: object, **__: object) -> None:
        raise Terminated

    monkeypatch.setattr(on_ray, "ray_session", stop)
    job, start_s = small_job(tmp_path, timeouts={"stop_s": 0.1}), monotonic_s()
    try:
        with pytest.raises(Terminated), open_run(job):
            pass
        assert monotonic_s() - start_s < 30
    finally:
        hung.set()


def test_data_that_never_arrive_end_the_run(
    tmp_path: Path, plans: list[PoolPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = read_nothing(monkeypatch)
    job = small_job(tmp_path, timeouts={"stop_s": 0.1, "no_progress_s": 0.1})
    message = r"data: not read within 0\.1 s \(timeouts\.no_progress_s\)"
    try:
        with pytest.raises(DataError, match=message), open_run(job):
            pass
    finally:
        hung.set()
    assert plans == []


def test_damaged_checkpoints_are_named_and_the_one_before_is_used(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = run_dir / "checkpoints"
    (checkpoints / "epoch-0002-round-01" / "rest.pt").unlink()
    (checkpoints / "epoch-0002" / "weights.safetensors").write_bytes(b"half")
    with workspace_of(small_job(run_dir.parent), str(run_dir)) as workspace:
        latest = workspace.checkpoints.latest
    assert latest is not None
    assert latest.text == "epoch 1"
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
    run_dir: Path, damaged: str, content: bytes
) -> None:
    for file in (run_dir / "checkpoints").glob(damaged):
        file.write_bytes(content)
    with pytest.raises(StorageError, match=r"(?s)(index\.json is|rest\.pt was changed).*new run"):
        workspace_of(small_job(run_dir.parent), str(run_dir)).__enter__()


def test_a_job_is_resolved_once_and_the_driver_keeps_neither_data_nor_network(
    tmp_path: Path, plans: list[PoolPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's object store and the workers have them for the rest of the run."""

    class Started(Exception):  # noqa: N818
        pass

    def start(resolved: Resolved, *_: object) -> None:
        gc.collect()
        assert [value() for value in read] == [None, None]
        [run_dir] = tmp_path.iterdir()
        assert load_job(run_dir / "job.yaml") == resolved.job
        assert resolved.job.workers.count == plans[0].workers
        assert resolved.learner.worker_count == resolved.job.workers.size
        raise Started

    read: list[weakref.ref[Any]] = []
    try_job = on_ray.try_job

    def try_and_watch(job: Job, **options: bool) -> Any:
        facts, shared, choose_threads = try_job(job, **options)
        read.extend([weakref.ref(shared), weakref.ref(choose_threads)])
        return facts, shared, choose_threads

    monkeypatch.setattr("raytrain_opt.execution.on_ray.try_job", try_and_watch)
    monkeypatch.setattr("ray.put", lambda _: None)
    monkeypatch.setattr("raytrain_opt.execution.start.start_pools", start)
    with pytest.raises(Started), open_run(small_job(tmp_path, workers={})):
        pass


def test_a_driver_starts_ray_before_it_imports_torch() -> None:
    code = "import sys, raytrain_opt.driver, raytrain_opt.execution.on_ray as _; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
