"""What happens to a run is written down with its time, also over several executions."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from raytrain_opt.errors import CommitError, PoolError
from raytrain_opt.paths import RunPaths
from raytrain_opt.telemetry.diary import Diary
from raytrain_opt.telemetry.records import Recorder
from raytrain_opt.telemetry.terminal import Lines
from raytrain_opt.telemetry.timeline import Event, Span

BEGAN_S = 1000.0
SPAN = Span("worker 0", "main_train", BEGAN_S + 10, 5.0, {"load_s": float("nan")}, 90.0, 300.0)


class PretendedPool:
    """Has one span and one event, for the first who asks."""

    def __init__(self, span: Span = SPAN) -> None:
        self._spans = [span]
        self._events = [Event("restarted", "slot 1 again", BEGAN_S + 12, "slot 1", 4.5)]

    def take_log(self) -> tuple[list[Span], list[Event]]:
        spans, events, self._spans, self._events = self._spans, self._events, [], []
        return spans, events


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths.create(str(tmp_path), "r")


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def recorder(paths: RunPaths) -> Iterator[Recorder]:
    made = Recorder(paths)
    yield made
    made.close()


@pytest.fixture
def diary(recorder: Recorder, output: io.StringIO) -> Diary:
    return Diary(recorder, Lines(Console(file=output)), BEGAN_S)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_spans_and_events_count_from_the_beginning_of_the_run(
    diary: Diary, paths: RunPaths
) -> None:
    pool = PretendedPool()
    diary.write(1, [pool])
    diary.write(2, [pool])
    assert lines(paths.timeline) == [
        {
            "schema_version": 1,
            "epoch": 1,
            "who": "worker 0",
            "doing": "main_train",
            "at_s": 10.0,
            "seconds": 5.0,
            "parts_s": {"load_s": None},
            "utilization_pct": 90.0,
            "memory_mib": 300.0,
        }
    ]
    [event] = lines(paths.events)
    assert event.pop("utc").endswith("+00:00")
    assert event == {
        "schema_version": 1,
        "epoch": 1,
        "what": "restarted",
        "text": "slot 1 again",
        "at_s": 12.0,
        "who": "slot 1",
        "cost_s": 4.5,
    }


def test_what_the_driver_does_is_a_span_of_its_own(
    diary: Diary, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([BEGAN_S + 1, BEGAN_S + 3])
    monkeypatch.setattr("raytrain_opt.telemetry.diary.monotonic_s", lambda: next(now))
    with diary.doing("commit"):
        pass
    diary.write(1, [PretendedPool()])
    found = [(at["who"], at["doing"], at["at_s"], at["seconds"]) for at in lines(paths.timeline)]
    assert found == [("driver", "commit", 1.0, 2.0), ("worker 0", "main_train", 10.0, 5.0)]


def test_a_resumed_run_goes_on_where_its_timeline_ends(
    diary: Diary, recorder: Recorder, paths: RunPaths, output: io.StringIO
) -> None:
    """What was not committed is forgotten, but not what happened."""
    diary.write(1, [PretendedPool()])
    diary.write(2, [PretendedPool(replace(SPAN, at_s=BEGAN_S + 20))])
    recorder.forget_after(0, 1)
    again = Diary(recorder, Lines(Console(file=output)), began_s=5000.0)
    again.go_on(2, "resumed after epoch 1")
    again.write(2, [PretendedPool(replace(SPAN, at_s=5003.0))])
    assert [(at["epoch"], at["at_s"]) for at in lines(paths.timeline)] == [(1, 10.0), (2, 18.0)]
    assert [at["what"] for at in lines(paths.events)][:3] == ["restarted", "restarted", "resumed"]
    assert "resumed after epoch 1" in output.getvalue()


@pytest.mark.parametrize(
    ("error", "what", "text"),
    [
        (PoolError("worker 1 is silent"), "failed", "worker 1 is silent"),
        (ZeroDivisionError("a secret"), "failed", "ZeroDivisionError"),
        (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt"),
    ],
)
def test_an_early_end_is_written_down(
    diary: Diary, paths: RunPaths, error: BaseException, what: str, text: str
) -> None:
    diary.end(3, error)
    [event] = lines(paths.events)
    assert (event["epoch"], event["what"], event["text"]) == (3, what, text)


def test_an_end_that_cannot_be_written_hides_no_error(
    diary: Diary, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise CommitError("no space left")

    monkeypatch.setattr("raytrain_opt.telemetry.records.append_json_line", full)
    error = PoolError("worker 1 is silent")
    diary.end(3, error)
    assert error.__notes__ == ["that could not be written down: no space left"]
