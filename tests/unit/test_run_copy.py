"""A run under the URI of an object storage, tried against S3 over HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import obstore
import pytest

from raytrain_opt import run_copy, storage
from raytrain_opt.errors import JobError, StorageError, TakenOverError
from raytrain_opt.paths import RunPaths, check_run
from raytrain_opt.storage import append_lines, open_store, remove_tree, write_json, write_text
from raytrain_opt.train.checkpoint import Point
from tests.support.s3_server import Fault, Request, S3Server, cut, delay, refuse


def index_of(run: RunPaths) -> list[int]:
    index = json.loads(storage.read(run.shown, "checkpoints/index.json") or b"")
    checkpoints: list[int] = index["checkpoints"]
    return checkpoints


def write_index(run: RunPaths, *checkpoints: int | str) -> None:
    write_json(run.checkpoints / "index.json", {"checkpoints": list(checkpoints)})


def names(uri: str) -> set[str]:
    return {entry["path"] for batch in obstore.list(open_store(uri)) for entry in batch}


def puts(s3: S3Server) -> list[str]:
    return [r.path for r in s3.requests if r.method == "PUT"]


@pytest.fixture
def run(s3: S3Server) -> RunPaths:
    return RunPaths.create(s3.new_uri(), "r")


def test_new_and_changed_files_are_copied(run: RunPaths) -> None:
    write_index(run, 1)
    append_lines(run.local / "rounds.jsonl", ['{"epoch": 1}'])
    run.publish()
    append_lines(run.local / "rounds.jsonl", ['{"epoch": 2}'])
    run.publish()
    assert index_of(run) == [1]
    assert storage.read(run.shown, "rounds.jsonl") == (run.local / "rounds.jsonl").read_bytes()


def test_files_of_ray_stay_on_this_machine(run: RunPaths) -> None:
    folder = run.local / "ray"
    assert folder.parent == run.local
    (folder / "slots").mkdir(parents=True)
    (folder / "slots" / "tuner.pkl").touch()
    run.publish()
    assert names(run.shown) == set()


def test_what_completes_a_run_is_copied_last(run: RunPaths, s3: S3Server) -> None:
    for path in (
        run.checkpoints / "index.json",
        run.result,
        run.local / "schedule.jsonl",
        run.job,
    ):
        write_json(path, {})
    run.publish()
    assert [name.rsplit("/", 1)[1] for name in puts(s3)[-2:]] == ["index.json", "result.json"]


def test_deleted_files_are_removed_and_nothing_is_copied_twice(
    run: RunPaths, s3: S3Server
) -> None:
    for name in ("epoch-0001", "epoch-0002"):
        (run.checkpoints / name).mkdir()
        write_text(run.checkpoints / name / "weights", name)
    run.publish()
    remove_tree(run.checkpoints / "epoch-0001")
    (run.local / ".job.yaml.1.tmp").write_text("half written")
    s3.requests.clear()
    run.publish()
    assert names(run.shown) == {"checkpoints/epoch-0002/weights"}
    assert puts(s3) == []


def test_large_files_are_uploaded_in_parts(
    run: RunPaths, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part is repeated alone."""
    monkeypatch.setattr(run_copy, "_UPLOAD_PART", 5 * 2**20)  # the least that S3 allows
    (run.checkpoints / "epoch-0001").mkdir()
    weights = run.checkpoints / "epoch-0001" / "weights.safetensors"
    weights.write_bytes(os.urandom(12 * 2**20))
    s3.applies_to = lambda request: request.method == "PUT" and request.size > 2**20
    s3.faults.extend([refuse("SlowDown"), None, cut])
    run.publish()
    assert max(request.size for request in s3.requests) == 5 * 2**20
    assert len([r for r in s3.requests if r.method == "PUT"]) == 3 + 2
    name = "checkpoints/epoch-0001/weights.safetensors"
    assert storage.read(run.shown, name) == weights.read_bytes()
    write_index(run, "epoch-0001")
    run.publish()
    fetched = RunPaths.existing(run.shown, write=False)
    assert (fetched.local / name).read_bytes() == weights.read_bytes()


# What a storage may do.

FAULTS: dict[str, list[Fault]] = {
    "503": [refuse("SlowDown")] * 3,
    "500": [refuse("InternalError", "500 Internal Server Error")] * 2,
    "lost connections": [cut, cut],
    "slow answers": [delay(0.2), refuse("SlowDown"), delay(0.2), cut],
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_requests_are_repeated(run: RunPaths, s3: S3Server, faults: list[Fault]) -> None:
    write_index(run, 1)
    s3.applies_to = lambda request: "index.json" in request.path
    s3.faults.extend(faults)
    run.publish()
    s3.faults.extend(faults)
    assert index_of(run) == [1]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clients that do not wait long for an answer."""
    monkeypatch.setitem(storage._CLIENT, "read_timeout", timedelta(seconds=0.2))
    open_store.cache_clear()
    yield
    open_store.cache_clear()


@pytest.mark.usefixtures("impatient")
def test_what_timed_out_is_copied_by_the_next_attempt(run: RunPaths, s3: S3Server) -> None:
    """Even if the storage has done it since."""
    write_index(run, 1)
    run.publish()
    write_index(run, 1, 2)
    done = threading.Event()

    def answer_late(request: Request) -> None:
        s3.pass_on(request)
        done.set()
        time.sleep(0.5)

    s3.applies_to = lambda request: request.method == "PUT"
    s3.faults.append(answer_late)
    with pytest.raises(StorageError, match=r"\(timed out\)"):
        run.publish()
    assert done.wait(30)
    write_index(run, 1, 2, 3)
    run.publish()
    assert index_of(run) == [1, 2, 3]
    s3.applies_to = lambda request: request.method == "GET"
    s3.faults.append(delay(0.5))
    assert index_of(run) == [1, 2, 3]  # a read is repeated at once


def test_a_put_whose_answer_is_lost_is_no_conflict(run: RunPaths, s3: S3Server) -> None:
    """The repeated request finds the object that the first one has made."""
    write_index(run, 1)
    run.publish()

    def lose_answer(request: Request) -> None:
        s3.pass_on(request)
        request.cut()

    write_index(run, 1, 2)
    s3.applies_to = lambda request: request.method == "PUT" and "index.json" in request.path
    s3.faults.append(lose_answer)
    run.publish()
    assert index_of(run) == [1, 2]
    write_index(run, 1, 2, 3)
    run.publish()
    assert index_of(run) == [1, 2, 3]


# S3 answers either of them to a request that removes several objects.
DENIED = (
    "<DeleteResult><Error><Key>{key}</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
    "</DeleteResult>"
)


@pytest.mark.parametrize("status", ["403 Forbidden", "200 OK"])
def test_a_storage_that_removes_nothing_ends_no_run(
    run: RunPaths, s3: S3Server, status: str
) -> None:
    (run.checkpoints / "epoch-0001").mkdir()
    write_text(run.checkpoints / "epoch-0001" / "weights", "1")
    run.publish()
    remove_tree(run.checkpoints / "epoch-0001")
    key = f"runs/{run.run_id}/checkpoints/epoch-0001/weights"
    denied = refuse("AccessDenied", status)
    if status == "200 OK":
        denied = lambda _: (status, DENIED.format(key=key).encode())  # noqa: E731
    s3.applies_to = lambda r: r.method == "DELETE" or "delete" in r.environ["QUERY_STRING"]
    s3.faults.extend([denied] * 9)
    run.publish()
    write_text(run.job, "job")
    run.publish()
    assert names(run.shown) == {"checkpoints/epoch-0001/weights", "job.yaml"}


@pytest.mark.parametrize("error", ["400 ExpiredToken", "403 InvalidAccessKeyId", "503 SlowDown"])
def test_what_cannot_be_repeated_is_an_error_without_secrets(
    run: RunPaths, s3: S3Server, error: str
) -> None:
    write_text(run.job, "job")
    code = error.split()[1]
    s3.faults.extend([refuse(code, error)] * 100)
    with pytest.raises(StorageError, match=rf"cannot be written; all files are in.*{code}") as e:
        run.publish()
    assert "SECRETKEY" not in str(e.value)
    assert "Debug" not in str(e.value)
    s3.reset()
    run.publish()  # new credentials, for example
    assert storage.read(run.shown, "job.yaml") == b"job"


def test_signatures_of_urls_are_not_shown() -> None:
    text = storage.error_text(OSError("PUT https://host/a?se=2030&sig=SECRET failed:\n  why?"))
    assert text == "PUT https://host/a failed: why?"


@pytest.mark.parametrize("uri", ["nosuchscheme://bucket/r", "s3://bucket/r?region=a&sas=b"])
def test_a_uri_that_cannot_be_used_is_named(tmp_path: Path, uri: str) -> None:
    run = RunPaths(tmp_path, uri)
    write_text(run.job, "job")
    with pytest.raises(StorageError, match="bucket/r.* cannot be written"):
        run.publish()


# Fetching.


def test_a_run_is_fetched_to_be_resumed(run: RunPaths) -> None:
    write_index(run)
    run.publish()
    resumed = RunPaths.existing(run.shown)
    assert (resumed.run_id, resumed.shown) == (run.run_id, run.shown)
    assert resumed.local != run.local
    assert (resumed.checkpoints / "index.json").is_file()
    with pytest.raises(JobError, match="--resume: holds no checkpoint"):
        RunPaths.existing(storage.join(run.shown, "nowhere"))


def test_nothing_is_fetched_without_a_run(s3: S3Server) -> None:
    """One folder too high may hold all runs of a year."""
    uri = s3.new_uri()
    run = RunPaths.create(uri, "r")
    write_index(run)
    run.publish()
    s3.requests.clear()
    with pytest.raises(JobError, match="holds no checkpoint"):
        RunPaths.existing(uri)
    assert len(s3.requests) == 1
    check_run(run.shown)


def test_the_folder_of_a_run_is_removed_at_the_end_of_the_process(
    run: RunPaths, tmp_path: Path
) -> None:
    """Unless it has something that the objects have not."""
    write_index(run)
    run.publish()
    code = f"""
from raytrain_opt.paths import RunPaths
from raytrain_opt.storage import write_json
resumed, changed = (RunPaths.existing({run.shown!r}, write=False) for _ in range(2))
write_json(changed.result, {{}})
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    [copy] = tmp_path.glob("rto-*")
    assert (copy / "result.json").exists()


def test_only_what_the_index_names_is_fetched(run: RunPaths, s3: S3Server) -> None:
    """A checkpoint that it does not name, left by a killed run, is removed with the next copy."""
    latest = Point(2, rounds=1, candidates=3).folder
    wanted = {"job.yaml", "epochs.jsonl", f"checkpoints/{latest}/weights.safetensors"}
    orphan = "checkpoints/epoch-0003/weights.safetensors"
    others = {"ray/state", f"checkpoints/{latest}/notes", "checkpoints/core", ".a"}
    for name in {*wanted, orphan, *others}:
        storage.write(run.shown, name, name.encode())
    index = json.dumps({"checkpoints": [{"folder": latest}]}).encode()
    storage.write(run.shown, "checkpoints/index.json", index)
    resumed = RunPaths.existing(run.shown)
    files = {str(p.relative_to(resumed.local)) for p in resumed.local.rglob("*") if p.is_file()}
    assert files - {".owner"} == {*wanted, "checkpoints/index.json"}
    s3.requests.clear()
    resumed.publish()
    assert [name.rsplit("/", 1)[1] for name in puts(s3)] == ["index.json"]  # its writer
    left = names(run.shown)
    assert orphan not in left
    assert {*wanted, *others} <= left


def test_a_run_that_cannot_be_fetched_leaves_nothing(
    run: RunPaths, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_index(run)
    write_text(run.job, "job")
    run.publish()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    s3.applies_to = lambda request: request.method == "GET" and "job.yaml" in request.path
    s3.faults.extend([refuse("AccessDenied", "403 Forbidden")] * 20)
    with pytest.raises(JobError, match="AccessDenied"):
        RunPaths.existing(run.shown)
    assert list(tmp_path.iterdir()) == []
    s3.reset()
    RunPaths.existing(run.shown)


# One process at a time.


def begin(run: RunPaths) -> None:
    write_index(run, 1)
    append_lines(run.local / "epochs.jsonl", ["1"])
    run.publish()


def test_a_process_whose_run_was_resumed_cannot_write(run: RunPaths) -> None:
    begin(run)
    RunPaths.existing(run.shown, write=False)  # to evaluate it
    second = RunPaths.existing(run.shown)
    append_lines(run.local / "epochs.jsonl", ["2"])
    run.publish()  # a resume that is refused has changed nothing
    third = RunPaths.existing(run.shown)
    third.publish()
    write_index(run)
    for late in (run, second):
        with pytest.raises(TakenOverError, match=rf"another process writes.*{os.getpid()} on"):
            late.publish()
    assert index_of(run) == [1]
    write_index(third, 1, 2)
    third.publish()
    assert index_of(run) == [1, 2]


def test_of_two_that_resume_a_run_at_once_one_gets_it(run: RunPaths, s3: S3Server) -> None:
    begin(run)
    first, second = RunPaths.existing(run.shown), RunPaths.existing(run.shown)

    def write_before(_: Request) -> None:
        s3.applies_to = lambda _: False
        second.publish()

    s3.applies_to = lambda request: request.method == "PUT"
    s3.faults.append(write_before)
    with pytest.raises(TakenOverError):
        first.publish()


@pytest.mark.parametrize("status", ["cut", "500 Lost"])
@pytest.mark.parametrize("name", ["lease/000001", "index.json"])
def test_a_name_whose_answer_is_lost_is_our_own(
    run: RunPaths, s3: S3Server, status: str, name: str
) -> None:
    """Of a process that begins a run, and of one that takes it over."""

    def lose_answer(request: Request) -> tuple[str, bytes] | None:
        s3.pass_on(request)
        if status == "cut":
            request.cut()
            return None
        request.size = 0
        return status, b""

    s3.applies_to = lambda request: request.method == "PUT" and name in request.path
    s3.faults.append(lose_answer)
    run.begin()
    begin(run)
    resumed = RunPaths.existing(run.shown)
    write_text(resumed.job, "job")
    resumed.publish()
    assert storage.read(run.shown, "job.yaml") == b"job"
    assert not s3.faults


@pytest.mark.parametrize("name", ["epochs.jsonl", "checkpoints/index.json"])
@pytest.mark.parametrize("when", ["before", "after"], ids="{} its first copy".format)
def test_a_put_in_progress_when_the_run_is_taken_over_changes_nothing(
    run: RunPaths, s3: S3Server, name: str, when: str
) -> None:
    """The former writer has found itself the writer, then sleeps until another one writes."""
    begin(run)
    append_lines(run.local / "epochs.jsonl", ["late"])
    write_index(run, "late")
    run.publish()
    others: list[RunPaths] = []

    def take_over(_: Request) -> None:
        s3.applies_to = lambda _: False
        other = RunPaths.existing(run.shown)
        other.publish()
        others.append(other)
        write_index(other, 1, 2)
        append_lines(other.local / "epochs.jsonl", ["2"])
        if when == "after":
            other.publish()

    append_lines(run.local / "epochs.jsonl", ["later"])
    write_index(run, "later")
    s3.applies_to = lambda request: request.method == "PUT" and request.path.endswith(name)
    s3.faults.append(take_over)
    with pytest.raises(TakenOverError):
        run.publish()
    [other] = others
    other.publish()
    assert index_of(run) == [1, 2]
    assert storage.read(run.shown, "epochs.jsonl") == (other.local / "epochs.jsonl").read_bytes()
