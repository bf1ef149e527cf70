"""A run directory and its copy in a remote storage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from pyarrow import fs

from raytrain_opt.errors import JobError, StorageError, TakenOverError
from raytrain_opt.paths import RunPaths, check_run
from raytrain_opt.storage import (
    append_lines,
    open_filesystem,
    remove_tree,
    write_json,
    write_text,
)

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


def test_a_storage_path_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError, match=r"storage_path: the run directory cannot be created.*file"):
        RunPaths.create(str(tmp_path / "file"), "r")


def test_an_earlier_run_is_found_by_its_index(tmp_path: Path) -> None:
    run = RunPaths.create(str(tmp_path), "r")
    with pytest.raises(JobError, match=r"--resume: holds no checkpoint"):
        RunPaths.existing(str(run.local))
    write_json(run.checkpoints / "index.json", {"checkpoints": []})
    resumed = RunPaths.existing(str(run.local))
    assert (resumed.local, resumed.run_id, resumed.shown) == (run.local, run.run_id, run.shown)


def test_a_directory_that_is_not_there_is_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="nowhere") as error:
        RunPaths.existing(str(tmp_path / "nowhere"))
    assert error.value.exit_code == 2


# Remote storage.


def test_publish_copies_all_files_to_the_uri(tmp_path: Path) -> None:
    run = RunPaths.create(f"file://{tmp_path}/bucket/", "r")
    assert run.shown == f"file://{tmp_path}/bucket/{run.run_id}"
    assert run.ray_storage == f"{run.shown}/ray"
    assert tmp_path not in run.local.parents
    try:
        write_json(run.checkpoints / "index.json", {"checkpoints": [1]})
        append_lines(run.rounds, ['{"epoch": 1}'])
        run.publish()
        append_lines(run.rounds, ['{"epoch": 2}'])
        run.publish()
        copy = tmp_path / "bucket" / run.run_id
        assert json.loads((copy / "checkpoints" / "index.json").read_text()) == {
            "checkpoints": [1]
        }
        assert (copy / "rounds.jsonl").read_text() == run.rounds.read_text()
    finally:
        remove_tree(run.local)


def test_runs_under_a_uri_with_options_have_directories_of_their_own() -> None:
    uri = "s3://bucket/runs?scheme=http&endpoint_override=127.0.0.1:9000&region=us-east-1"
    runs = [RunPaths.create(uri, "r") for _ in range(2)]
    for run in runs:
        remove_tree(run.local)
        filesystem, root = open_filesystem(run.shown)
        assert (root, filesystem.region) == (f"bucket/runs/{run.run_id}", "us-east-1")
        assert open_filesystem(run.ray_storage)[1] == f"{root}/ray"
    assert runs[0].run_id != runs[1].run_id


def test_run_ids_of_the_same_second_do_not_collide(tmp_path: Path) -> None:
    random_part = RunPaths.create(str(tmp_path), "r").run_id.rsplit("-", 1)[1]
    assert len(random_part) == 16


def test_what_completes_a_run_is_published_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, published = RunPaths.create(f"file://{tmp_path}/bucket", "r"), []
    for path in (run.checkpoints / "index.json", run.result, run.schedule, run.job):
        write_json(path, {})
    copy = fs.copy_files
    monkeypatch.setattr(fs, "copy_files", lambda *a, **k: published.append(a[0]) or copy(*a, **k))
    run.publish()
    assert [Path(path).name for path in published[-2:]] == ["index.json", "result.json"]
    remove_tree(run.local)


def test_a_copy_that_is_cut_off_leaves_the_index_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunPaths.create(f"file://{tmp_path}/bucket", "r")
    write_json(run.checkpoints / "index.json", {"checkpoints": [1]})
    run.publish()

    def cut_off(_source: str, target: str, **_: object) -> None:
        Path(target).write_text("{")
        raise OSError("connection lost")

    write_json(run.checkpoints / "index.json", {"checkpoints": [1, 2]})
    with monkeypatch.context() as patch:
        patch.setattr(fs, "copy_files", cut_off)
        with pytest.raises(StorageError, match="connection lost"):
            run.publish()
    copy = tmp_path / "bucket" / run.run_id / "checkpoints" / "index.json"
    assert json.loads(copy.read_text()) == {"checkpoints": [1]}
    run.publish()
    assert json.loads(copy.read_text()) == {"checkpoints": [1, 2]}


def test_publish_removes_deleted_files_and_copies_nothing_twice(tmp_path: Path) -> None:
    run = RunPaths.create(f"file://{tmp_path}/bucket", "r")
    copy = tmp_path / "bucket" / run.run_id
    for name in ("epoch-0001", "epoch-0002"):
        (run.checkpoints / name).mkdir()
        write_text(run.checkpoints / name / "weights", name)
    run.publish()
    (copy / "checkpoints" / "epoch-0002" / "weights").write_text("as sent before")
    remove_tree(run.checkpoints / "epoch-0001")
    (run.local / ".job.yaml.1.tmp").write_text("half written")
    run.publish()
    assert not (copy / "checkpoints" / "epoch-0001" / "weights").exists()
    sent_once = copy / "checkpoints" / "epoch-0002" / "weights"
    assert sent_once.read_text() == "as sent before"
    assert not (copy / ".job.yaml.1.tmp").exists()


def test_a_run_under_a_uri_is_downloaded_to_be_resumed(tmp_path: Path) -> None:
    run = RunPaths.create(f"file://{tmp_path}/bucket", "r")
    write_json(run.checkpoints / "index.json", {"checkpoints": []})
    run.publish()
    resumed = RunPaths.existing(run.shown)
    assert (resumed.run_id, resumed.shown) == (run.run_id, run.shown)
    assert resumed.local != run.local
    assert (resumed.checkpoints / "index.json").is_file()
    with pytest.raises(JobError, match="--resume"):
        RunPaths.existing(f"file://{tmp_path}/bucket/nowhere")


def test_nothing_is_downloaded_from_a_uri_without_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One folder too high may hold all runs of a year."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError

    run = RunPaths.create(f"file://{tmp_path}/bucket", "r")
    write_json(run.checkpoints / "index.json", {"checkpoints": []})
    run.publish()
    monkeypatch.setattr(fs, "copy_files", refuse)
    with pytest.raises(JobError, match="holds no checkpoint"):
        RunPaths.existing(f"file://{tmp_path}/bucket")
    check_run(run.shown)


def test_the_copy_of_a_remote_run_is_removed_at_the_end_of_the_process(tmp_path: Path) -> None:
    """Unless it has something that the remote storage has not."""
    code = f"""
from raytrain_opt.paths import RunPaths
from raytrain_opt.storage import write_json
run = RunPaths.create("file://{tmp_path}/bucket", "r")
write_json(run.checkpoints / "index.json", {{"checkpoints": []}})
run.publish()
resumed, changed = RunPaths.existing(run.shown), RunPaths.existing(run.shown)
write_json(changed.result, {{}})
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    [copy] = tmp_path.glob("raytrain_opt-*")
    assert (copy / "result.json").exists()


def test_a_downloaded_run_is_not_copied_back_and_its_deletions_are_repeated(
    tmp_path: Path,
) -> None:
    run = RunPaths.create(f"file://{tmp_path}/bucket", "r")
    folders = ["epoch-0001", "epoch-0002"]
    for folder in folders:
        (run.checkpoints / folder).mkdir()
        write_json(run.checkpoints / folder / "rest.pt", {})
    write_json(run.checkpoints / "index.json", folders)
    run.publish()
    copy = tmp_path / "bucket" / run.run_id / "checkpoints"
    resumed = RunPaths.existing(run.shown)
    (copy / "epoch-0002" / "rest.pt").write_text("as sent before")
    remove_tree(resumed.checkpoints / "epoch-0001")
    resumed.publish()
    assert not (copy / "epoch-0001" / "rest.pt").exists()
    assert (copy / "epoch-0002" / "rest.pt").read_text() == "as sent before"


def test_of_a_run_under_a_uri_only_what_its_index_names_is_fetched(tmp_path: Path) -> None:
    """A checkpoint that it does not name, left by a killed run, is removed with the next copy."""
    run = RunPaths.create(f"file://{tmp_path}/bucket", "r")
    remote = tmp_path / "bucket" / run.run_id
    wanted = {"job.yaml", "epochs.jsonl", "checkpoints/epoch-0002-round-01/weights.safetensors"}
    orphan = "checkpoints/epoch-0003/weights.safetensors"
    others = {
        "ray/workers/state",
        "checkpoints/epoch-0002-round-01/notes",
        "checkpoints/core",
        ".a",
    }
    for name in {*wanted, orphan, *others}:
        (remote / name).parent.mkdir(parents=True, exist_ok=True)
        write_text(remote / name, name)
    write_json(remote / "checkpoints/index.json", [{"folder": "epoch-0002-round-01"}])
    resumed = RunPaths.existing(run.shown)
    files = {str(p.relative_to(resumed.local)) for p in resumed.local.rglob("*") if p.is_file()}
    assert files == {*wanted, "checkpoints/index.json"}
    resumed.publish()
    assert not (remote / orphan).exists()
    assert all((remote / name).exists() for name in {*wanted, *others})


def test_a_run_that_another_process_has_resumed_is_not_written(tmp_path: Path) -> None:
    """A driver that was cut off, and comes back, must not overwrite what the other has done."""
    first = RunPaths.create(f"file://{tmp_path}/bucket", "r")
    write_json(first.checkpoints / "index.json", {"checkpoints": [1]})
    first.claim()
    first.publish()
    second = RunPaths.existing(first.shown)
    first.publish()
    second.claim()
    write_json(second.checkpoints / "index.json", {"checkpoints": [1, 2]})
    second.publish()
    write_json(first.checkpoints / "index.json", {"checkpoints": []})
    with pytest.raises(TakenOverError, match=f"resumed by another process.*{os.getpid()}"):
        first.publish()
    copy = tmp_path / "bucket" / first.run_id / "checkpoints" / "index.json"
    assert json.loads(copy.read_text()) == {"checkpoints": [1, 2]}
    second.publish()


def test_a_run_that_cannot_be_fetched_leaves_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    remote = tmp_path / "bucket" / "r"
    (remote / "checkpoints").mkdir(parents=True)
    write_json(remote / "checkpoints/index.json", [])

    def refuse(*_: object, **__: object) -> None:
        raise OSError("503")

    monkeypatch.setattr(fs, "copy_files", refuse)
    with pytest.raises(JobError, match="503"):
        RunPaths.existing(f"file://{remote}")
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    "uri", ["file://{file}/below", "nosuchscheme://bucket"], ids=["a file is in the way", "scheme"]
)
def test_a_uri_that_cannot_be_written_is_named(tmp_path: Path, uri: str) -> None:
    (tmp_path / "file").write_text("")
    run = RunPaths(tmp_path / "local", uri.format(file=tmp_path / "file"))
    run.local.mkdir()
    write_text(run.job, "job")
    assert run.remote is not None
    with pytest.raises(StorageError, match=rf"{run.remote} cannot be written"):
        run.publish()


def test_publishing_a_local_run_does_nothing(tmp_path: Path) -> None:
    run = RunPaths.create(str(tmp_path), "r")
    run.publish()
    assert list(tmp_path.iterdir()) == [run.local]


def test_sync_records_flushes_existing_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, synced = RunPaths.create(str(tmp_path), "r"), []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    directories = [run.local.stat().st_ino, tmp_path.stat().st_ino]
    run.sync_records()
    assert synced == directories
    synced.clear()
    append_lines(run.rounds, ["{}"])
    append_lines(run.epochs, ["{}"])
    run.sync_records()
    assert synced == [run.rounds.stat().st_ino, run.epochs.stat().st_ino, *directories]
