"""The list of runs: their states and results, from a folder and from a URI."""

from __future__ import annotations

import fcntl
import json
import shutil
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from raytrain_opt.cli import main
from raytrain_opt.commands.runs import list_runs
from raytrain_opt.errors import JobError
from raytrain_opt.execution.workspace import is_locked, lock_run_directory
from raytrain_opt.storage import write
from tests.support.s3_server import S3Server
from tests.support.synthetic_runs import batch_size, event_line, write_lines, write_run


def name(job: str, day: int) -> str:
    return f"{job}-202601{day:02}-101112-{day:016x}"


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """A run of each state, and a folder that is none; the job `b` has the newest run."""
    storage = tmp_path / "runs"
    write_run(storage / name("b", 6), epochs=4)
    for day, kind in ((5, "failed"), (4, "interrupted"), (3, "resumed")):
        run = write_run(storage / name("a", day), epochs=2, finished=False)
        write_lines(run / "events.jsonl", [event_line("restarted", ""), event_line(kind, "")])
    chosen = storage / name("a", 2)
    chosen.mkdir()
    (chosen / "batch_size.json").write_text(json.dumps(batch_size()))
    damaged = write_run(storage / name("a", 1))
    (damaged / "result.json").write_text("{")
    (storage / "other").mkdir()
    return storage


STATES = [
    "finished", "failed", "interrupted", "interrupted", "batch size found", "damaged records",
]  # fmt: skip


def test_runs_are_listed_with_their_states_newest_first(storage: Path) -> None:
    runs = list_runs(str(storage))
    assert [run.state for run in runs] == STATES
    finished, failed, _, killed, chosen, _ = runs
    assert (finished.run_dir, finished.started.day) == (str(storage / name("b", 6)), 6)
    assert (finished.epochs, finished.duration_s, finished.search_fraction) == (4, 41.0, 0.75)
    assert finished.cells()[1:] == [
        "4 of 4", "accuracy 87.50 %", "41.0 s", "75 %", "SGD", "0.2", name("b", 6),
    ]  # fmt: skip
    assert (failed.cells()[1], failed.duration_s, killed.duration_s) == ("2 of 4", 40.0, None)
    assert (chosen.cells()[1], chosen.duration_s) == ("0 of ?", 21.4)


def test_a_run_is_running_while_its_directory_is_locked(storage: Path) -> None:
    run_dir = storage / name("a", 5)
    with lock_run_directory(run_dir):
        assert is_locked(run_dir)
        assert list_runs(str(storage))[1].state == "running"
    assert not is_locked(run_dir)


def test_a_look_at_the_lock_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as `is_locked` does, for a moment
        release = threading.Timer(0.05, fcntl.flock, (file, fcntl.LOCK_UN))
        release.start()
        with lock_run_directory(tmp_path) as sign:
            assert sign()
        release.join()


def test_a_run_that_cannot_be_read_does_not_hide_the_others(storage: Path) -> None:
    result = storage / name("b", 6) / "result.json"
    result.unlink()
    result.symlink_to("/proc/self/mem")  # reading it is an input/output error, also for root
    assert [run.state for run in list_runs(str(storage))] == ["not readable", *STATES[1:]]


def test_the_command_prints_a_table(storage: Path) -> None:
    table = CliRunner().invoke(main, ["runs", str(storage)], env={"COLUMNS": "80"}).output
    assert f"6 runs in {storage}" in table
    assert all(name("a", day) in table for day in range(1, 6))


def test_a_folder_without_runs_has_none(tmp_path: Path) -> None:
    assert list_runs(str(tmp_path)) == []
    with pytest.raises(JobError, match=r"STORAGE: there is no such folder \(given: '.*absent'\)"):
        list_runs(str(tmp_path / "absent"))
    done = CliRunner().invoke(main, ["runs", "s3://user:secret@bucket/runs"])
    assert (done.exit_code, "STORAGE" in done.output) == (2, True)


def test_runs_under_a_uri_are_read_in_place(storage: Path, s3: S3Server) -> None:
    uri = s3.new_uri()
    shutil.rmtree(storage / name("a", 1))
    for path in (path for path in storage.rglob("*") if path.is_file()):
        write(uri, path.relative_to(storage).as_posix(), path.read_bytes())
    runs = list_runs(uri)
    assert [run.state for run in runs] == [
        "finished", "failed", "interrupted", "unfinished", "batch size found",
    ]  # fmt: skip
    assert runs[0].latest is not None
    assert runs[0].latest.test_metric == 0.875
