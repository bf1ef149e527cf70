"""Events are recorded in seconds of the run, also over several executions."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from raytrain_opt.errors import PoolError, StorageError
from raytrain_opt.paths import RunPaths
from raytrain_opt.recording.recorder import EventLog, Recorder
from raytrain_opt.recording.records import EpochRecord, Event
from raytrain_opt.terminal import Terminal
from tests.support import synthetic_runs

BEGAN_S = 1000.0
RESTART = Event(
    kind="restarted",
    text="slot 1 was restarted",
    time_s=BEGAN_S + 12,
    process="slot 1",
    silent_s=4.5,
)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths.create(str(tmp_path), "r")


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def recorder(paths: RunPaths) -> Iterator[Recorder]:
    recorder = Recorder(paths)
    yield recorder
    recorder.close()


@pytest.fixture
def event_log(recorder: Recorder, output: io.StringIO) -> EventLog:
    return EventLog(recorder, Terminal(Console(file=output)).note, BEGAN_S)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def test_events_count_from_the_beginning_of_the_run(event_log: EventLog, paths: RunPaths) -> None:
    event_log.write(1, [RESTART])
    event_log.write(2, [])
    [event] = lines(paths.events)
    assert event.pop("utc").endswith("+00:00")
    assert event == {
        "schema_version": 1,
        "epoch": 1,
        "kind": "restarted",
        "text": "slot 1 was restarted",
        "time_s": 12.0,
        "process": "slot 1",
        "silent_s": 4.5,
    }


@pytest.mark.parametrize(
    ("partial_s", "event_s", "end_s"),
    [(0.0, 12.0, 32.0), (4.0, 12.0, 36.0), (1.0, 38.0, 38.0)],
    ids=["after an epoch", "killed after a checkpoint within an epoch", "interrupted later"],
)
def test_a_resumed_run_continues_its_clock(
    recorder: Recorder,
    paths: RunPaths,
    output: io.StringIO,
    partial_s: float,
    event_s: float,
    end_s: float,
) -> None:
    """What follows the last checkpoint is removed, but for the events."""
    for epoch in (1, 2):  # the first ends at 32 s
        recorder.epoch(EpochRecord.model_validate(synthetic_runs.epoch_line(epoch)), epoch)
    synthetic_runs.write_schedule(paths.schedule, [0.1], [0.1])
    recorder.add_events([RESTART.model_copy(update={"time_s": event_s})])
    recorder.truncate_after(0, 1)
    resumed = EventLog(recorder, Terminal(Console(file=output)).note, began_s=5000.0)
    before_s = resumed.elapsed_s()
    resumed.resume_clock(2, "resumed after epoch 1", partial_s)
    assert resumed.elapsed_s() - before_s == pytest.approx(end_s, abs=1.0)
    assert [event["kind"] for event in lines(paths.events)] == ["restarted", "resumed"]
    assert "resumed after epoch 1" in output.getvalue()


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (PoolError("worker 1 is silent"), "failed", "worker 1 is silent"),
        (ZeroDivisionError("a secret"), "failed", "ZeroDivisionError"),
        (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt"),
    ],
)
def test_an_early_end_is_recorded(
    event_log: EventLog, paths: RunPaths, error: BaseException, kind: str, text: str
) -> None:
    event_log.close_with(3, error)
    [event] = lines(paths.events)
    assert (event["epoch"], event["kind"], event["text"]) == (3, kind, text)


def test_an_end_that_cannot_be_recorded_hides_no_error(
    event_log: EventLog, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StorageError("no space left")

    monkeypatch.setattr("raytrain_opt.recording.recorder.append_lines", full)
    error = PoolError("worker 1 is silent")
    event_log.close_with(3, error)
    assert error.__notes__ == ["this could not be recorded: no space left"]
