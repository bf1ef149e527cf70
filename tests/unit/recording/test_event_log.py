"""Spans and events are recorded in seconds of the run, also over several executions."""

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
from raytrain_opt.recording.records import EpochRecord, Event, Span
from raytrain_opt.terminal import Terminal
from tests.support import synthetic_runs

BEGAN_S = 1000.0
SPAN = Span(
    process="worker 0",
    command="main_train",
    start_s=BEGAN_S + 10,
    duration_s=5.0,
    timings_s={"load_s": float("nan")},
)
RESTART = Event(
    kind="restarted",
    text="slot 1 was restarted",
    time_s=BEGAN_S + 12,
    process="slot 1",
    silent_s=4.5,
)
LOG = ([SPAN], [RESTART])


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


def test_spans_and_events_count_from_the_beginning_of_the_run(
    event_log: EventLog, paths: RunPaths
) -> None:
    event_log.write(1, [LOG])
    event_log.write(2, [([], [])])
    assert lines(paths.timeline) == [
        {
            "schema_version": 1,
            "epoch": 1,
            "process": "worker 0",
            "command": "main_train",
            "start_s": 10.0,
            "duration_s": 5.0,
            "timings_s": {"load_s": None},
        }
    ]
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


def test_a_block_of_the_driver_is_a_span(
    event_log: EventLog, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([BEGAN_S + 1, BEGAN_S + 3])
    monkeypatch.setattr("raytrain_opt.recording.recorder.monotonic_s", lambda: next(now))
    with event_log.span("checkpoint"):
        pass
    event_log.write(1, [LOG])
    names = ("process", "command", "start_s", "duration_s")
    assert [tuple(span[name] for name in names) for span in lines(paths.timeline)] == [
        ("driver", "checkpoint", 1.0, 2.0),
        ("worker 0", "main_train", 10.0, 5.0),
    ]


def test_a_resumed_run_continues_where_its_timeline_ends(
    event_log: EventLog, recorder: Recorder, paths: RunPaths, output: io.StringIO
) -> None:
    """Spans after the last checkpoint are removed; events are kept."""
    event_log.write(1, [LOG])
    event_log.write(2, [([SPAN.model_copy(update={"start_s": BEGAN_S + 20})], [RESTART])])
    recorder.epoch(EpochRecord.model_validate(synthetic_runs.epoch_line(1)), 1)
    synthetic_runs.write_schedule(paths.schedule, [0.1])
    assert recorder.truncate_after(0, 1) == 0
    resumed = EventLog(recorder, Terminal(Console(file=output)).note, began_s=5000.0)
    resumed.resume_clock(2, "resumed after epoch 1", partial_s=0.0)
    new = EventLog(recorder, Terminal(Console(file=output)).note, began_s=5000.0)
    assert resumed.elapsed_s() - new.elapsed_s() == pytest.approx(15.0, abs=1.0)
    resumed.write(2, [([SPAN.model_copy(update={"start_s": 5003.0})], [])])
    assert [(span["epoch"], span["start_s"]) for span in lines(paths.timeline)] == [
        (1, 10.0),
        (2, 18.0),
    ]
    kinds = [event["kind"] for event in lines(paths.events)]
    assert kinds[:3] == ["restarted", "restarted", "resumed"]
    assert "resumed after epoch 1" in output.getvalue()


@pytest.mark.parametrize(
    ("partial_s", "end_s"),
    [(4.0, 19.0), (1.0, 18.0)],
    ids=["killed after a checkpoint within an epoch", "interrupted later"],
)
def test_the_time_of_an_epoch_without_spans_counts(
    event_log: EventLog, recorder: Recorder, partial_s: float, end_s: float
) -> None:
    """Its timeline ends at 15 s."""
    event_log.write(1, [([SPAN], [RESTART.model_copy(update={"time_s": BEGAN_S + 18})])])
    before_s = event_log.elapsed_s()
    event_log.resume_clock(2, "resumed after step 3 of epoch 2", partial_s)
    assert event_log.elapsed_s() - before_s == pytest.approx(end_s, abs=1.0)


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
