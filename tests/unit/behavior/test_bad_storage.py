"""Unusable storage, runs that cannot be resumed, two runs in one place: seen before Ray starts."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raytrain_opt.config.schema import CheckpointSection
from raytrain_opt.errors import JobError, StorageError
from raytrain_opt.execution.training_run import RunProgress
from raytrain_opt.execution.workspace import lock_run_directory
from raytrain_opt.storage import append_lines, write_text
from raytrain_opt.train.checkpoint import Checkpoints, Point
from raytrain_opt.train.state import capture
from tests.support.cli_errors import command_error, write_job
from tests.support.full_disk import limit_file_size

pytestmark = pytest.mark.usefixtures("no_ray")


# Unusable storage: storage_path, words of the message.
STORAGES = [
    ("{folder}/file/below", "the run directory cannot be created: [Errno 20] Not a directory"),
    ("~no_such_user/runs", "the run directory cannot be created: Could not determine home"),
    (
        "{folder}/" + "n" * 300,
        "the run directory cannot be created: [Errno 36] File name too long",
    ),
    ("file://{folder}/file/below", "the run directory cannot be created: [Errno 20]"),
    ("nowhere://bucket/runs", "cannot be written: nowhere://bucket/runs"),
    ("s3://KEY:hunter2@bucket/runs", "holds credentials"),
    ("s3://bucket/runs?secret_key=hunter2", "holds credentials"),
]


@pytest.mark.parametrize(("storage", "words"), STORAGES)
def test_storage_that_cannot_be_written_is_named(tmp_path: Path, storage: str, words: str) -> None:
    (tmp_path / "file").touch()
    line = f"storage_path: '{storage.format(folder=tmp_path)}'"
    message = command_error("run", write_job(tmp_path, line))
    assert message.split("\n")[-1].strip().startswith("storage_path: ")
    assert words in message
    assert "hunter2" not in message


def test_full_storage_is_reported_at_the_start_and_left_clean(tmp_path: Path) -> None:
    file = write_job(tmp_path)
    with limit_file_size(10):
        message = command_error("run", file)
    assert "storage_path: cannot be written: " in message
    assert "File too large" in message
    assert list((tmp_path / "runs").iterdir()) == []


# Runs to resume.


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that ended after its first epoch."""
    folder = tmp_path / "ein Lauf – 実行"
    (folder / "checkpoints").mkdir(parents=True)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = capture(model, optimizer, torch.amp.GradScaler("cpu"), copy=True)
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointSection())
    checkpoints.save(Point(1), state, RunProgress(2).to_json(), 0.5)
    Path(write_job(tmp_path)).rename(folder / "job.yaml")
    return folder


class _Planted:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


def plant_pickle(file: Path, mark: Path) -> None:
    file.write_bytes(pickle.dumps(_Planted(mark)))


def torch_archive(file: Path, mark: Path) -> None:
    torch.save({"optimizer": _Planted(mark), "scaler": {}, "progress": {}}, file)


def legacy_torch_file(file: Path, mark: Path) -> None:
    torch.save(_Planted(mark), file, _use_new_zipfile_serialization=False)


CODE = (plant_pickle, torch_archive, legacy_torch_file)
REST, WEIGHTS = "checkpoints/epoch-0001/rest.pt", "checkpoints/epoch-0001/weights.safetensors"
INDEX = "checkpoints/index.json"


@pytest.mark.parametrize("name", [REST, WEIGHTS])
@pytest.mark.parametrize("plant", CODE)
def test_a_planted_checkpoint_is_named_and_its_code_is_not_run(
    tmp_path: Path, run_dir: Path, name: str, plant: Callable[[Path, Path], None]
) -> None:
    plant(run_dir / name, tmp_path / "code was run")
    message = command_error("run", "--resume", str(run_dir))
    assert f"{run_dir / name} was changed" in message
    _update_hash(run_dir, name)
    message = command_error("run", "--resume", str(run_dir))
    assert f"{run_dir / name} is damaged" in message
    assert not (tmp_path / "code was run").exists()


def _update_hash(run_dir: Path, name: str) -> None:
    """Put the hash of the planted file into the index, as an attacker would."""
    file, index = run_dir / name, run_dir / INDEX
    value = json.loads(index.read_text())
    value["checkpoints"][-1]["sha256"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    index.write_text(json.dumps(value))


def test_the_planted_code_would_run(tmp_path: Path) -> None:
    """Otherwise the test above would prove nothing."""
    plant_pickle(tmp_path / "file", tmp_path / "mark")
    pickle.loads((tmp_path / "file").read_bytes())
    assert (tmp_path / "mark").exists()


RESUMES = [
    ("nothing", "--resume: holds no checkpoint of a run (checkpoints/index.json)"),
    ("file", "--resume: holds no checkpoint of a run"),
    ("~no_such_user/run", "--resume: cannot be read: Could not determine home"),
    ("n" * 300, "--resume: cannot be read: [Errno 36] File name too long"),
    ("nowhere://bucket/run", "--resume: cannot be read: "),
    ("s3://KEY:hunter2@bucket/run", "--resume: holds credentials"),
]


@pytest.mark.parametrize(("run_dir", "words"), RESUMES)
def test_a_directory_without_a_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_dir: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    message = command_error("run", "--resume", run_dir)
    assert message.startswith("arguments: 1 problem\n")
    assert words in message
    assert "hunter2" not in message


def test_a_run_without_its_job_is_refused(run_dir: Path) -> None:
    (run_dir / "job.yaml").unlink()
    assert f"{run_dir}/job.yaml: 1 problem\n  the file: does not" in command_error(
        "run", "--resume", str(run_dir)
    )


# Two runs in one directory.


def test_a_directory_in_use_is_refused_and_its_user_is_named(run_dir: Path) -> None:
    with lock_run_directory(run_dir) as sign:
        sign()
        message = command_error("run", "--resume", str(run_dir))
    assert "--resume: another run is writing to this directory" in message
    assert f"process {os.getpid()} on " in message
    with lock_run_directory(run_dir):
        pass


def test_the_lock_ends_when_its_process_is_killed(run_dir: Path) -> None:
    """A loader process, which is a fork, may live a few seconds longer."""
    hold = (
        "import os, pathlib, sys, time\n"
        "from raytrain_opt.execution.workspace import lock_run_directory\n"
        f"with lock_run_directory(pathlib.Path({str(run_dir)!r})) as sign:\n"
        "    sign(); is_parent = os.fork()\n"
        "    if is_parent: print('held', flush=True)\n"
        "    time.sleep(100 if is_parent else 3)"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(JobError, match=f"process {other.pid} on"), lock_run_directory(run_dir):
            pass
        other.kill()
        other.wait(10)
    with lock_run_directory(run_dir) as sign:
        assert sign()


def test_nothing_is_written_through_a_link(tmp_path: Path, run_dir: Path) -> None:
    """A run directory of somebody else may contain any."""
    target = tmp_path / "target"
    target.write_text("precious")
    for name in (".lock", "events.jsonl", f".job.yaml.{os.getpid()}.tmp"):
        (run_dir / name).symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"), lock_run_directory(run_dir):
        pass
    with pytest.raises(StorageError, match=r"events\.jsonl cannot be written: .*symbolic link"):
        append_lines(run_dir / "events.jsonl", ["{}"])
    write_text(run_dir / "job.yaml", "new")
    assert (run_dir / "job.yaml").read_text() == "new"
    assert target.read_text() == "precious"


@pytest.mark.parametrize("number", [37, 38, 95])  # ENOLCK, ENOSYS, EOPNOTSUPP
def test_a_file_system_without_locks_is_still_used(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with lock_run_directory(run_dir) as sign:
        assert not sign()
