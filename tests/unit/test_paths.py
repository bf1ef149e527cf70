"""A run's files: whole or not at all, in a new directory, and sent where the job says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from raytrain_opt.errors import CommitError, JobError
from raytrain_opt.paths import (
    RunPaths,
    append_json_line,
    check_storage,
    remove_tree,
    write_atomic,
    write_json,
    write_text,
)

# Directories.


def test_every_run_has_a_directory_of_its_own(tmp_path: Path) -> None:
    runs = [RunPaths.create(str(tmp_path / "runs"), "digits") for _ in range(20)]
    assert len({run.local for run in runs}) == 20
    for run in runs:
        assert run.local.parent == tmp_path / "runs"
        assert run.checkpoints.is_dir()
        assert run.run_id == run.local.name
        assert run.run_id.startswith("digits-")
        assert run.shown == str(run.local)


def test_all_files_lie_in_the_run_directory(tmp_path: Path) -> None:
    run = RunPaths.create(str(tmp_path), "r")
    files = [run.job, run.rounds, run.epochs, run.schedule, run.result, run.tensorboard]
    assert {file.parent for file in [*files, run.checkpoints]} == {run.local}
    assert len({*files, run.checkpoints}) == 7
    assert Path(run.ray_storage).parent == run.local


def test_relative_and_home_paths_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert RunPaths.create("runs", "r").local.parent == tmp_path / "runs"
    assert RunPaths.create("~/runs", "r").local.parent == tmp_path / "home" / "runs"


def test_a_storage_path_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError, match=r"storage_path: no run directory can be made.*file"):
        RunPaths.create(str(tmp_path / "file"), "r")


@pytest.mark.parametrize(
    ("uri", "secret"),
    [
        ("s3://KEY:SECRET@bucket/runs", True),
        ("s3://bucket/runs?access_key=KEY&secret_key=SECRET", True),
        ("abfss://container@account/runs?sas_token=SECRET", True),
        ("abfss://container@account.dfs.core.windows.net/runs", False),
        ("s3://bucket/runs?region=eu-west-1&endpoint_override=host:9000", False),
        ("runs/key:secret@home", False),
    ],
)
def test_credentials_in_a_uri_are_refused_without_showing_them(uri: str, secret: bool) -> None:
    found = check_storage(uri)
    assert [problem.path for problem in found] == ["storage_path"] * secret
    assert "SECRET" not in str(found)


def test_an_earlier_run_is_found_by_its_index(tmp_path: Path) -> None:
    run = RunPaths.create(str(tmp_path), "r")
    with pytest.raises(JobError, match=r"--resume: holds no commit"):
        RunPaths.existing(str(run.local))
    write_json(run.checkpoints / "index.json", {"commits": []})
    again = RunPaths.existing(str(run.local))
    assert (again.local, again.run_id, again.shown) == (run.local, run.run_id, run.shown)


def test_a_directory_that_is_not_there_is_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="nowhere") as error:
        RunPaths.existing(str(tmp_path / "nowhere"))
    assert error.value.exit_code == 2


# Remote storage.


def test_publish_sends_what_is_there_to_the_uri(tmp_path: Path) -> None:
    run = RunPaths.create(f"file://{tmp_path}/bucket/", "r")
    assert run.shown == f"file://{tmp_path}/bucket/{run.run_id}"
    assert run.ray_storage == f"{run.shown}/ray"
    assert tmp_path not in run.local.parents
    try:
        write_json(run.checkpoints / "index.json", {"commits": [1]})
        append_json_line(run.rounds, {"epoch": 1})
        run.publish()
        append_json_line(run.rounds, {"epoch": 2})
        run.publish()
        there = tmp_path / "bucket" / run.run_id
        assert json.loads((there / "checkpoints" / "index.json").read_text()) == {"commits": [1]}
        assert (there / "rounds.jsonl").read_text() == run.rounds.read_text()
    finally:
        remove_tree(run.local)


def test_what_is_removed_here_is_removed_there_and_nothing_is_sent_twice(tmp_path: Path) -> None:
    run = RunPaths.create(f"file://{tmp_path}/bucket", "r")
    there = tmp_path / "bucket" / run.run_id
    for name in ("epoch-0001", "epoch-0002"):
        (run.checkpoints / name).mkdir()
        write_text(run.checkpoints / name / "weights", name)
    run.publish()
    (there / "checkpoints" / "epoch-0002" / "weights").write_text("as sent before")
    remove_tree(run.checkpoints / "epoch-0001")
    (run.local / ".job.yaml.1.tmp").write_text("half written")
    run.publish()
    assert not (there / "checkpoints" / "epoch-0001" / "weights").exists()
    sent_once = there / "checkpoints" / "epoch-0002" / "weights"
    assert sent_once.read_text() == "as sent before"
    assert not (there / ".job.yaml.1.tmp").exists()


def test_a_run_under_a_uri_is_fetched_to_be_resumed(tmp_path: Path) -> None:
    run = RunPaths.create(f"file://{tmp_path}/bucket", "r")
    write_json(run.checkpoints / "index.json", {"commits": []})
    run.publish()
    again = RunPaths.existing(run.shown)
    assert (again.run_id, again.shown) == (run.run_id, run.shown)
    assert again.local != run.local
    assert (again.checkpoints / "index.json").is_file()
    with pytest.raises(JobError, match="--resume"):
        RunPaths.existing(f"file://{tmp_path}/bucket/nowhere")


def test_a_fetched_run_is_not_sent_again_and_what_it_removes_is_removed_there(
    tmp_path: Path,
) -> None:
    run = RunPaths.create(f"file://{tmp_path}/bucket", "r")
    for name in ("index.json", "epoch-0001/rest.pt", "epoch-0002/rest.pt"):
        (run.checkpoints / name).parent.mkdir(exist_ok=True)
        write_json(run.checkpoints / name, {})
    run.publish()
    there = tmp_path / "bucket" / run.run_id / "checkpoints"
    again = RunPaths.existing(run.shown)
    (there / "epoch-0002" / "rest.pt").write_text("as sent before")
    remove_tree(again.checkpoints / "epoch-0001")
    again.publish()
    assert not (there / "epoch-0001" / "rest.pt").exists()
    assert (there / "epoch-0002" / "rest.pt").read_text() == "as sent before"


@pytest.mark.parametrize(
    "uri", ["file://{file}/below", "nosuchscheme://bucket"], ids=["a file is in the way", "scheme"]
)
def test_a_uri_that_cannot_be_written_is_named(tmp_path: Path, uri: str) -> None:
    (tmp_path / "file").write_text("")
    run = RunPaths(tmp_path / "local", uri.format(file=tmp_path / "file"))
    run.local.mkdir()
    write_text(run.job, "job")
    assert run.remote is not None
    with pytest.raises(CommitError, match=rf"{run.remote} cannot be written"):
        run.publish()


def test_a_local_run_is_published_where_it_is(tmp_path: Path) -> None:
    run = RunPaths.create(str(tmp_path), "r")
    run.publish()
    assert list(tmp_path.iterdir()) == [run.local]


# Files.


def test_json_is_readable_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"käse": [1, 0.1]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"käse": [1, 0.1]}
    assert "käse" in path.read_text(encoding="utf-8")
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


@pytest.mark.parametrize("value", [float("nan"), {"a": [float("inf")]}])
def test_what_json_cannot_hold_is_never_written(tmp_path: Path, value: Any) -> None:
    for write in (write_json, append_json_line):
        with pytest.raises(ValueError, match="not JSON compliant"):
            write(tmp_path / "x.json", value)
    assert not (tmp_path / "x.json").exists() or not (tmp_path / "x.json").read_text()


@pytest.mark.parametrize("error", [OSError(28, "full"), RuntimeError("torch's way to say full")])
def test_a_write_that_fails_leaves_what_stood_there(tmp_path: Path, error: Exception) -> None:
    path = tmp_path / "x"
    write_text(path, "old")

    def write(temporary: Path) -> None:
        temporary.write_text("half of the n")
        raise error

    with pytest.raises(CommitError, match=r"x cannot be written: .*full") as caught:
        write_atomic(path, write)
    assert caught.value.__cause__ is error
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_readers_see_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_text(path, "old")

    def write(temporary: Path) -> None:
        temporary.write_text("new")
        assert path.read_text() == "old"

    write_atomic(path, write)
    assert path.read_text() == "new"


def test_lines_are_appended(tmp_path: Path) -> None:
    for value in ({"a": 1}, {"b": "ü"}):
        append_json_line(tmp_path / "x.jsonl", value)
    lines = (tmp_path / "x.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [{"a": 1}, {"b": "ü"}]


def test_a_line_that_cannot_be_written_is_a_commit_error(tmp_path: Path) -> None:
    with pytest.raises(CommitError, match=r"nowhere.x\.jsonl cannot be written"):
        append_json_line(tmp_path / "nowhere" / "x.jsonl", {})


def test_records_are_on_disk_before_a_commit_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, synced = RunPaths.create(str(tmp_path), "r"), []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    run.sync_records()
    assert synced == []
    append_json_line(run.rounds, {})
    append_json_line(run.epochs, {})
    run.sync_records()
    assert synced == [run.rounds.stat().st_ino, run.epochs.stat().st_ino]


def test_removing_what_is_not_there_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    remove_tree(tmp_path / "a")
    remove_tree(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
