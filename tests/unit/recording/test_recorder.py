"""Records are valid JSON lines, TensorBoard reads the scalars, and events have a clock."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raytrain_opt.errors import PoolError, RecordError, StorageError
from raytrain_opt.paths import RunPaths
from raytrain_opt.recording.reader import read_lines
from raytrain_opt.recording.recorder import EventLog, Recorder, write_record
from raytrain_opt.recording.records import (
    EpochRecord,
    Event,
    ResultRecord,
    RoundRecord,
    ScheduleRecord,
)
from raytrain_opt.results import Steps
from tests.support import synthetic_runs
from tests.support.tensorboard_scalars import read_scalars

NAN, INF = float("nan"), float("inf")


def epoch(number: int = 1, **values: Any) -> EpochRecord:
    line = synthetic_runs.epoch_line(number, **{"train_loss": 0.5, **values})
    return EpochRecord.model_validate(line)


def add_epoch(recorder: Recorder, number: int) -> None:
    """Write both lines of an epoch."""
    recorder.epoch(epoch(number), number)
    schedule = ScheduleRecord(
        epoch=number,
        optimizer="SGD",
        auto_weight_decay=False,
        restarts=False,
        lr_multipliers={},
        steps=Steps(0, (0.1, 0.2)),
    )
    recorder.add(schedule)


def round_(number: int = 1, *scores: float, **changes: Any) -> RoundRecord:
    line = synthetic_runs.round_line(number, **changes)
    candidates = [
        {**line["candidates"][0], "index": index, "score": score, "lr": 0.1}
        for index, score in enumerate(scores)
    ]
    return RoundRecord.model_validate({**line, "candidates": candidates})


def result(**changes: Any) -> ResultRecord:
    return ResultRecord.model_validate({**synthetic_runs.result(3), **changes})


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths.create(str(tmp_path), "r")


@pytest.fixture
def recorder(paths: RunPaths) -> Iterator[Recorder]:
    recorder = Recorder(paths)
    yield recorder
    recorder.close()


def strict(text: str) -> Any:
    """Read JSON strictly: NaN and Infinity are errors."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def lines(path: Path) -> list[Any]:
    return [strict(line) for line in path.read_text().split("\n")[:-1]]


def test_an_epoch_is_a_line_with_all_its_values(recorder: Recorder, paths: RunPaths) -> None:
    recorder.epoch(epoch(1), 25)
    recorder.epoch(epoch(2, **synthetic_runs.evaluation(None)), 50)
    first, second = lines(paths.local / "epochs.jsonl")
    assert EpochRecord.model_validate(first) == epoch(1)
    assert (second["epoch"], second["metric"]) == (2, None)


def test_numbers_that_are_not_finite_are_written_as_null(
    recorder: Recorder, paths: RunPaths
) -> None:
    recorder.epoch(
        epoch(
            train_loss=NAN,
            test_metrics={"loss": INF, "accuracy": 0.1},
            timings_s={"a": NAN, "b": 1.0},
        ),
        1,
    )
    recorder.add(round_(1, -INF, 0.5))
    write_record(paths.local, result(startup_s={"a": INF, "b": 1.0}))
    [line] = lines(paths.local / "epochs.jsonl")
    assert (line["train_loss"], line["test_metrics"]["loss"]) == (None, None)
    assert line["timings_s"] == {"a": None, "b": 1.0}
    assert [c["score"] for c in lines(paths.local / "rounds.jsonl")[0]["candidates"]] == [
        None,
        0.5,
    ]
    assert strict(paths.result.read_text())["startup_s"] == {"a": None, "b": 1.0}


def test_a_record_is_read_back_as_it_was_written(recorder: Recorder, paths: RunPaths) -> None:
    """Also with a line separator of Unicode in a text, which is no end of a line in JSON."""
    written = round_(1, 0.5, 0.25, reason="one\u2028two")
    recorder.add(written)
    assert read_lines(str(paths.local), RoundRecord) == [written]
    recorder.truncate_after(1, 0)
    assert read_lines(str(paths.local), RoundRecord) == [written]


@pytest.mark.parametrize(("rounds", "epochs"), [(0, 0), (3, 1), (4, 2), (6, 3)])
def test_lines_after_the_last_checkpoint_are_removed(
    recorder: Recorder, paths: RunPaths, rounds: int, epochs: int
) -> None:
    """Also in the middle of an epoch: each has two rounds here."""
    for number in (1, 2, 3):
        recorder.add(round_(number, 0.1))
        recorder.add(round_(number, 0.2))
        add_epoch(recorder, number)
    before = lines(paths.local / "rounds.jsonl")
    recorder.truncate_after(rounds, epochs)
    assert lines(paths.local / "rounds.jsonl") == before[:rounds]
    assert [line["epoch"] for line in lines(paths.local / "epochs.jsonl")] == [1, 2, 3][:epochs]
    assert len(recorder.read(ScheduleRecord)) == epochs
    recorder.epoch(epoch(9), 9)
    assert lines(paths.local / "epochs.jsonl")[-1]["epoch"] == 9


@pytest.mark.parametrize("lost", ["epochs.jsonl", "."])
def test_records_that_are_removed_during_the_run_end_it(
    recorder: Recorder, paths: RunPaths, lost: str
) -> None:
    add_epoch(recorder, 1)
    for path in paths.local.rglob("*.jsonl" if lost == "." else lost):
        path.unlink()
    with pytest.raises(RecordError, match=r"epochs\.jsonl was removed or cut while"):
        recorder.epoch(epoch(2), 2)
    with pytest.raises(RecordError, match=r"epochs\.jsonl was removed or cut while"):
        recorder.read(EpochRecord)


@pytest.mark.parametrize("torn", ['{"schema_version": 1, "epo', "\0" * 40])
def test_a_line_cut_off_by_a_full_disk_is_removed_before_the_next(
    recorder: Recorder, paths: RunPaths, torn: str
) -> None:
    for number in (1, 2, 3):
        with (paths.local / "epochs.jsonl").open("a") as file:  # before the first line, too
            file.write(torn)
        recorder.epoch(epoch(number), number)
    assert [line["epoch"] for line in lines(paths.local / "epochs.jsonl")] == [1, 2, 3]


def test_a_run_without_the_rates_of_its_checkpoint_is_not_resumed(
    recorder: Recorder, paths: RunPaths
) -> None:
    add_epoch(recorder, 1)
    (paths.local / "schedule.jsonl").unlink()
    with pytest.raises(RecordError, match=r"schedule\.jsonl: has 0 lines, but had 1"):
        recorder.truncate_after(0, 1)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("epochs", "{1}{1}{2}", "has a line twice, or without the one before"),
        ("epochs", "{2}{3}", "has a line twice, or without the one before"),
        ("rounds", "{1}{1}", "has a line twice"),
        ("epochs", "{1}x\n", "line 2: is damaged"),
        ("epochs", "{1}", "has 1 lines, but had 2 at the last checkpoint"),
        ("epochs", "", "has 0 lines, but had 2"),
        ("events", "{1}\0\n", "line 2: is damaged"),
    ],
)
def test_records_are_looked_at_before_one_is_changed(
    recorder: Recorder, paths: RunPaths, name: str, content: str, words: str
) -> None:
    for number in (1, 2, 3):
        recorder.add(round_(number, 0.1))
        add_epoch(recorder, number)
        recorder.add(Event(kind="lost", text="slot 1", time_s=number))
    path = paths.local / f"{name}.jsonl"
    written = path.read_text().splitlines(True)
    path.write_text(content.format("", *written))
    before = {path: path.read_bytes() for path in paths.local.glob("*.jsonl")}
    with pytest.raises(RecordError, match=rf"{name}\.jsonl.*{words}.*restore the file from a"):
        recorder.truncate_after(2, 2)
    assert {path: path.read_bytes() for path in paths.local.glob("*.jsonl")} == before


def test_tensorboard_reads_the_scalars(recorder: Recorder, paths: RunPaths) -> None:
    recorder.epoch(epoch(2, test_metrics={"accuracy": 0.5, "top5": None}), 20)
    recorder.close()
    scalars = read_scalars(paths.tensorboard)
    assert scalars["epoch/train_loss"] == (20, 0.5)
    assert scalars["epoch/samples_per_s"] == (20, 960.0)
    assert scalars["epoch/test_accuracy"] == (20, 0.5)
    assert "epoch/test_top5" not in scalars


def test_scalars_are_readable_while_the_run_continues(recorder: Recorder, paths: RunPaths) -> None:
    recorder.epoch(epoch(2), 20)
    deadline_s = time.monotonic() + 60
    scalars = read_scalars(paths.tensorboard)
    while "epoch/train_loss" not in scalars and time.monotonic() < deadline_s:
        time.sleep(0.1)
        scalars = read_scalars(paths.tensorboard)
    assert scalars["epoch/train_loss"] == (20, 0.5)


# Events.

BEGAN_S = 1000.0
RESTART = Event(kind="restarted", text="slot 1 was restarted", time_s=BEGAN_S + 12, silent_s=4.5)


@pytest.fixture
def event_log(recorder: Recorder) -> EventLog:
    return EventLog(recorder, lambda _: None, BEGAN_S)


def test_events_count_from_the_beginning_of_the_run(event_log: EventLog, paths: RunPaths) -> None:
    event_log.write(1, [RESTART])
    event_log.write(2, [])
    [event] = lines(paths.local / "events.jsonl")
    assert event.pop("utc").endswith("+00:00")
    assert event == {
        "schema_version": 1,
        "epoch": 1,
        "kind": "restarted",
        "text": "slot 1 was restarted",
        "time_s": 12.0,
        "process": None,
        "silent_s": 4.5,
    }


@pytest.mark.parametrize(
    ("partial_s", "event_s", "end_s"),
    [(0.0, 12.0, 32.0), (4.0, 12.0, 36.0), (1.0, 38.0, 38.0)],
    ids=["after an epoch", "killed after a checkpoint within an epoch", "interrupted later"],
)
def test_a_resumed_run_continues_its_clock(
    recorder: Recorder, paths: RunPaths, partial_s: float, event_s: float, end_s: float
) -> None:
    """What follows the last checkpoint is removed, but for the events."""
    for number in (1, 2):  # the first ends at 32 s
        add_epoch(recorder, number)
    recorder.add(RESTART.model_copy(update={"time_s": event_s}))
    recorder.truncate_after(0, 1)
    notes: list[str] = []
    resumed = EventLog(recorder, notes.append, began_s=5000.0)
    before_s = resumed.elapsed_s()
    resumed.resume_clock(2, "resumed after epoch 1", partial_s)
    assert resumed.elapsed_s() - before_s == pytest.approx(end_s, abs=1.0)
    assert [event["kind"] for event in lines(paths.local / "events.jsonl")] == [
        "restarted",
        "resumed",
    ]
    assert notes == ["resumed after epoch 1"]


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
    [event] = lines(paths.local / "events.jsonl")
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
