"""Storage that refuses, runs that cannot be resumed, two runs in one directory: told before
anything of Ray is started.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import files_at_most
from refusals import refused, written
from torch import nn

from raytrain_opt.config.schema import CheckpointSection
from raytrain_opt.errors import JobError
from raytrain_opt.lock import only_user
from raytrain_opt.train.checkpoint import Checkpoints
from raytrain_opt.train.state import capture
from raytrain_opt.training_run import Position

pytestmark = pytest.mark.usefixtures("no_ray")


# Where results cannot go: storage_path, words of the message.
STORAGES = [
    ("{folder}/file/below", "no run directory can be made in it: [Errno 20] Not a directory"),
    ("~no_such_user/runs", "no run directory can be made in it: Could not determine home"),
    ("{folder}/" + "n" * 300, "no run directory can be made in it: [Errno 36] File name too long"),
    ("file://{folder}/file/below", "cannot be written"),
    ("nowhere://bucket/runs", "cannot be written: nowhere://bucket/runs"),
    ("s3://KEY:hunter2@bucket/runs", "holds credentials"),
    ("s3://bucket/runs?secret_key=hunter2", "holds credentials"),
]


@pytest.mark.parametrize(("storage", "words"), STORAGES)
def test_storage_that_cannot_be_written(tmp_path: Path, storage: str, words: str) -> None:
    (tmp_path / "file").touch()
    line = f"storage_path: '{storage.format(folder=tmp_path)}'"
    told = refused("run", written(tmp_path, line))
    assert told.split("\n")[-1].strip().startswith("storage_path: ")
    assert words in told
    assert "hunter2" not in told


def test_full_storage_is_found_at_the_start_and_left_clean(tmp_path: Path) -> None:
    file = written(tmp_path)
    with files_at_most(10):
        told = refused("run", file)
    assert "storage_path: cannot be written: " in told
    assert "File too large" in told
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
    commits = Checkpoints(folder / "checkpoints", CheckpointSection())
    commits.save(1, state, Position(2).to_plain(), 0.5)
    Path(written(tmp_path)).rename(folder / "job.yaml")
    return folder


class _Planted:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


def plain_pickle(file: Path, mark: Path) -> None:
    file.write_bytes(pickle.dumps(_Planted(mark)))


def torch_archive(file: Path, mark: Path) -> None:
    torch.save({"optimizer": _Planted(mark), "scaler": {}, "position": {}}, file)


def legacy_torch_file(file: Path, mark: Path) -> None:
    torch.save(_Planted(mark), file, _use_new_zipfile_serialization=False)


def cut_off(file: Path, _: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def emptied(file: Path, _: Path) -> None:
    file.write_bytes(b"")


def removed(file: Path, _: Path) -> None:
    file.unlink()


def something_else(file: Path, _: Path) -> None:
    torch.save([1, 2], file)


def other_archive(file: Path, _: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a", "b")


def text(content: str) -> Callable[[Path, Path], None]:
    return lambda file, _: file.write_text(content) and None


CODE = (plain_pickle, torch_archive, legacy_torch_file)
REST, WEIGHTS = "checkpoints/epoch-0001/rest.pt", "checkpoints/epoch-0001/weights.safetensors"
INDEX = "checkpoints/index.json"
DAMAGED = [
    *((REST, damage) for damage in (*CODE, cut_off, emptied, removed, something_else)),
    (REST, other_archive),
    *((WEIGHTS, damage) for damage in (*CODE, cut_off, emptied, removed)),
    *((INDEX, text(content)) for content in ("", "{", "[]", "3", '{"commits": [{}]}')),
    (INDEX, text('{"commits": [{"epoch": 1, "folder": "../../..", "test_accuracy": null}]}')),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGED)
def test_a_damaged_or_planted_commit_is_named_and_none_of_its_code_is_run(
    tmp_path: Path, run_dir: Path, name: str, damage: Callable[[Path, Path], None]
) -> None:
    damage(run_dir / name, tmp_path / "code was run")
    told = refused("run", "--resume", str(run_dir))
    assert any(f"{run_dir / name} {words}" in told for words in ("is ", "cannot be read"))
    _write_down_its_hash(run_dir, name)
    told = refused("run", "--resume", str(run_dir))
    assert any(f"{run_dir / name} {words}" in told for words in ("is damaged", "cannot be read"))
    assert not (tmp_path / "code was run").exists()


def _write_down_its_hash(run_dir: Path, name: str) -> None:
    """As somebody would who wants a planted file to be read."""
    file, index = run_dir / name, run_dir / INDEX
    if name == INDEX or not file.exists():
        return
    value = json.loads(index.read_text())
    value["commits"][-1]["sha256"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    index.write_text(json.dumps(value))


def test_the_planted_code_would_run(tmp_path: Path) -> None:
    """Or the test above would pass for the wrong reason."""
    plain_pickle(tmp_path / "file", tmp_path / "mark")
    pickle.loads((tmp_path / "file").read_bytes())
    assert (tmp_path / "mark").exists()


def test_a_position_that_is_none(tmp_path: Path, run_dir: Path) -> None:
    rest = torch.load(run_dir / REST, weights_only=True)
    torch.save({**rest, "position": {"history": 3}}, run_dir / REST)
    _write_down_its_hash(run_dir, REST)
    assert "the commit's position is none of a run" in refused("run", "--resume", str(run_dir))


RESUMES = [
    ("nothing", "--resume: holds no commit of a run (checkpoints/index.json)"),
    ("file", "--resume: holds no commit of a run"),
    ("~no_such_user/run", "--resume: cannot be read: Could not determine home"),
    ("n" * 300, "--resume: cannot be read: [Errno 36] File name too long"),
    ("nowhere://bucket/run", "--resume: cannot be read: "),
    ("s3://KEY:hunter2@bucket/run", "--resume: holds credentials"),
]


@pytest.mark.parametrize(("given", "words"), RESUMES)
def test_nothing_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    told = refused("run", "--resume", given)
    assert told.startswith("arguments: 1 problem\n")
    assert words in told
    assert "hunter2" not in told


def test_a_run_without_its_job(run_dir: Path) -> None:
    (run_dir / "job.yaml").unlink()
    assert f"{run_dir}/job.yaml: 1 problem\n  the file: does not" in refused(
        "run", "--resume", str(run_dir)
    )


# Two runs in one directory.


def test_a_directory_in_use_is_refused_and_says_by_whom(run_dir: Path) -> None:
    with only_user(run_dir) as held:
        assert held
        told = refused("run", "--resume", str(run_dir))
    assert "--resume: another run is writing to this directory: process " in told
    assert f"process {os.getpid()} on " in told
    with only_user(run_dir):
        pass


def test_the_lock_ends_with_its_process_however_that_dies(run_dir: Path) -> None:
    hold = (
        "import pathlib, sys, time; from raytrain_opt.lock import only_user\n"
        f"with only_user(pathlib.Path({str(run_dir)!r})):\n"
        "    print('held', flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(JobError, match=f"process {other.pid} on"), only_user(run_dir):
            pass
        other.kill()
        other.wait(10)
    with only_user(run_dir) as held:
        assert held


@pytest.mark.parametrize("number", [37, 38, 95])  # ENOLCK, ENOSYS, EOPNOTSUPP
def test_a_file_system_without_locks_is_used_without(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with only_user(run_dir) as held:
        assert not held
