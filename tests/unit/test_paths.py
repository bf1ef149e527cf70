"""A run directory on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raytrain_opt.errors import JobError
from raytrain_opt.paths import RunPaths, find_runs, newest_unfinished
from raytrain_opt.storage import append_lines, write_json

# Directories.


def test_every_run_has_its_own_directory(tmp_path: Path) -> None:
    runs = [RunPaths.create(str(tmp_path / "runs"), "digits") for _ in range(20)]
    assert len({run.local for run in runs}) == 20
    for run in runs:
        assert run.local.parent == tmp_path / "runs"
        assert run.checkpoints.is_dir()
        assert run.run_id == run.local.name
        assert run.run_id.startswith("digits-")
        assert run.shown == str(run.local)


def test_relative_and_home_paths_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert RunPaths.create("runs", "r").local.parent == tmp_path / "runs"
    assert RunPaths.create("~/runs", "r").local.parent == tmp_path / "home" / "runs"


def test_an_earlier_run_is_found_by_its_index(tmp_path: Path) -> None:
    run = RunPaths.create(str(tmp_path), "r")
    with pytest.raises(JobError, match=r"--resume: holds no checkpoint"):
        RunPaths.existing(str(run.local))
    write_json(run.checkpoints / "index.json", {"checkpoints": []})
    resumed = RunPaths.existing(str(run.local))
    assert (resumed.local, resumed.run_id, resumed.shown) == (run.local, run.run_id, run.shown)


def test_the_run_of_another_user_is_read_but_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunPaths.create(str(tmp_path), "r")
    write_json(run.checkpoints / "index.json", {"checkpoints": []})
    assert newest_unfinished(str(tmp_path), "r") == str(run.local)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert newest_unfinished(str(tmp_path), "r") is None
    assert RunPaths.existing(str(run.local), write=False).local == run.local
    with pytest.raises(JobError, match=r"--resume: belongs to another user.*cp -r"):
        RunPaths.existing(str(run.local))


def test_what_only_resembles_a_run_is_left_out(tmp_path: Path) -> None:
    run = RunPaths.create(str(tmp_path), "r")
    write_json(run.checkpoints / "index.json", {"checkpoints": []})
    for name in ("r-99999999-999999-", "r-20260230-000000-", "r-20260101-246060-"):
        (tmp_path / f"{name}0123456789abcdef" / "checkpoints").mkdir(parents=True)
    (tmp_path / "r-29990101-000000-0123456789abcdef").write_text("a file")
    (tmp_path / "r-29990102-000000-0123456789abcdef").symlink_to("nowhere")
    os.mkfifo(tmp_path / "r-29990103-000000-0123456789abcdef")
    assert [found.run_dir for found in find_runs(str(tmp_path))] == [str(run.local)]
    assert newest_unfinished(str(tmp_path), "r") == str(run.local)


def test_a_file_uri_names_a_folder(tmp_path: Path) -> None:
    run = RunPaths.create(f"file://{tmp_path}/a%20b", "r")
    assert run.shown == str(tmp_path / "a b" / run.run_id)
    write_json(run.checkpoints / "index.json", {"checkpoints": []})
    assert RunPaths.existing(f"file://{tmp_path}/a%20b/{run.run_id}").local == run.local


def test_sync_records_flushes_existing_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, synced = RunPaths.create(str(tmp_path), "r"), []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    directories = [run.local.stat().st_ino, tmp_path.stat().st_ino]
    run.sync_records()
    assert synced == directories
    synced.clear()
    record = run.local / "rounds.jsonl"
    append_lines(record, ["{}"])
    run.sync_records()
    assert synced == [record.stat().st_ino, *directories]
