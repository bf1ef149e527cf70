"""Checkpoints beside the training: storage that refuses or hangs, states that are of no use."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from itertools import count

import pytest
import torch
from rich.console import Console
from torch import nn

from raytrain_opt.config.schema import CheckpointSection
from raytrain_opt.errors import CheckpointError, DivergedError, StorageError, TakenOverError
from raytrain_opt.execution import checkpoint_schedule
from raytrain_opt.execution.checkpoint_schedule import CheckpointSchedule, Interval
from raytrain_opt.execution.progress import RunProgress
from raytrain_opt.paths import RunPaths
from raytrain_opt.recording.recorder import EventLog, Recorder
from raytrain_opt.storage import read, remove_tree
from raytrain_opt.terminal import Terminal
from raytrain_opt.train.checkpoint import Checkpoints, read_index
from raytrain_opt.train.state import TrainingState, capture
from tests.support.s3_server import S3Server, refuse
from tests.support.small_jobs import read_lines


def state(
    value: float = 1.0, mask: float = 1.0, dtype: torch.dtype = torch.float16
) -> TrainingState:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((2, 2), mask).to(dtype))
    torch.nn.init.constant_(model.weight, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return capture(model, optimizer, torch.amp.GradScaler("cpu"), copy=True)


EXPIRED = refuse("ExpiredToken", "400 Bad Request")


@pytest.fixture
def paths(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunPaths]:
    monkeypatch.setattr(checkpoint_schedule, "_FIRST_PAUSE_S", 0.01)
    paths = RunPaths.create(s3.new_uri(), "r")
    s3.applies_to = lambda request: "index.json" in request.path
    yield paths
    remove_tree(paths.local)


OpenWriter = Callable[..., CheckpointSchedule]


@pytest.fixture
def open_writer(paths: RunPaths) -> Iterator[OpenWriter]:
    recorder, terminal = Recorder(paths), Terminal(Console(file=io.StringIO()))
    checkpoints = Checkpoints(paths.checkpoints, CheckpointSection())

    def open_with(limit_s: float = 30.0) -> CheckpointSchedule:
        return CheckpointSchedule(
            checkpoints, paths, EventLog(recorder, terminal.note, 0.0), limit_s
        )

    yield open_with
    recorder.close()


def test_a_signal_while_a_checkpoint_is_waited_for_does_not_lose_it(
    open_writer: OpenWriter, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, written = open_writer(), threading.Event()
    monkeypatch.setattr(paths, "publish", lambda: written.wait(10))
    writer.save(state(), RunProgress(next_epoch=2))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_schedule, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            writer.wait()
    threading.Timer(0.2, written.set).start()
    writer.close()
    assert written.is_set()


def test_refused_copies_are_repeated_beside_the_training(
    open_writer: OpenWriter, paths: RunPaths, s3: S3Server
) -> None:
    writer = open_writer()
    s3.faults.extend([EXPIRED] * 3)
    writer.save(state(), RunProgress(next_epoch=2))
    writer.wait()
    index = read(paths.shown, "checkpoints/index.json")
    assert index is not None
    assert [checkpoint["epoch"] for checkpoint in json.loads(index)["checkpoints"]] == [1]
    [event] = read_lines(str(paths.local), "events")
    assert (event["kind"], event["epoch"]) == ("storage", 1)
    assert "refused 3 copies" in event["text"]
    assert "ExpiredToken" in event["text"]


def test_storage_that_refuses_for_long_ends_the_run(
    open_writer: OpenWriter, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_schedule, "monotonic_s", count(0.0, step=10.0).__next__)
    writer = open_writer()
    s3.faults.extend([EXPIRED] * 1000)
    writer.save(state(), RunProgress(next_epoch=2))
    with pytest.raises(StorageError, match="ExpiredToken"):
        writer.wait()
    assert len(s3.faults) == 1000 - 3  # after 10, 20 and 30 s of 30


def test_storage_that_does_not_answer_ends_the_run(open_writer: OpenWriter, s3: S3Server) -> None:
    """The training waits for it no longer than the limit, and so does the end of the run."""
    answers = threading.Event()
    s3.faults.append(lambda _: answers.wait(60) and None)
    writer = open_writer(limit_s=0.05)
    writer.save(state(), RunProgress(next_epoch=2))
    with pytest.raises(StorageError, match=r"not written within 0\.1 s \(timeouts.no_progress_s"):
        writer.save(state(), RunProgress(next_epoch=3))
    answers.set()
    writer.close()


def test_a_run_that_was_taken_over_ends_at_once(open_writer: OpenWriter, paths: RunPaths) -> None:
    writer = open_writer()
    writer.save(state(), RunProgress(next_epoch=2))
    writer.wait()
    RunPaths.existing(paths.shown).publish()
    writer.save(state(), RunProgress(next_epoch=3))
    with pytest.raises(TakenOverError):
        writer.wait()


def test_an_interrupted_run_repeats_no_copy(
    open_writer: OpenWriter, paths: RunPaths, s3: S3Server
) -> None:
    s3.faults.extend([EXPIRED] * 1000)
    writer = open_writer()
    writer.save(state(), RunProgress(next_epoch=2))
    writer.close()
    with pytest.raises(StorageError):
        writer.wait()
    assert [checkpoint.epoch for checkpoint in read_index(paths.checkpoints)] == [1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_not_saved(
    open_writer: OpenWriter, paths: RunPaths, value: float
) -> None:
    writer = open_writer()
    writer.save(state(), RunProgress(next_epoch=2))
    writer.save(state(value), RunProgress(next_epoch=3))
    with pytest.raises(DivergedError, match=r"after epoch 2: model\.weight is not finite"):
        writer.wait()
    assert [checkpoint.epoch for checkpoint in read_index(paths.checkpoints)] == [1]


@pytest.mark.parametrize("value", [float("-inf"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2])
def test_masks_of_infinity_are_saved(
    open_writer: OpenWriter, value: float, dtype: torch.dtype
) -> None:
    writer = open_writer()
    writer.save(state(mask=value, dtype=dtype), RunProgress(next_epoch=2))
    writer.wait()
    assert writer.latest is not None


def test_an_interval_of_steps_ends_with_the_last_of_them() -> None:
    interval = Interval(CheckpointSection(every=3))
    assert interval.limit(9) == 3
    for _ in range(2):
        interval.count(2)
        assert not interval.steps_are_over
        assert (interval.limit(9), interval.limit(0)) == (1, 0)
        interval.count(1)
        assert interval.steps_are_over
        interval.restart()
    assert not interval.ends_within(0.0)


def test_an_interval_of_time_ends_after_any_number_of_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(checkpoint_schedule, "monotonic_s", lambda: now_s[0])
    interval = Interval(CheckpointSection(every="4s"))
    for _ in range(2):
        interval.count(1000)
        now_s[0] += 3.9
        assert not interval.ends_within(0.0)
        assert interval.ends_within(0.2)  # a checkpoint that takes so long is begun now
        assert interval.limit(9) == 9
        now_s[0] += 0.2
        assert interval.ends_within(0.0)
        interval.restart()
    now_s[0] += 1.9
    assert not interval.ends_within(60.0)  # at least half of it is between two checkpoints


def test_a_time_is_over_when_the_checkpoint_before_is_written(
    open_writer: OpenWriter, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a slow storage does not stop the training."""
    now_s = [100.0]
    monkeypatch.setattr(checkpoint_schedule, "monotonic_s", lambda: now_s[0])
    answers = threading.Event()
    s3.faults.append(lambda _: answers.wait(60) and None)
    writer = open_writer()
    writer.save(state(), RunProgress(next_epoch=2))
    assert not writer.is_due
    now_s[0] += 61.0
    assert not writer.is_due
    answers.set()
    writer.wait()
    assert writer.is_due


def test_a_checkpoint_is_not_written_twice(open_writer: OpenWriter, paths: RunPaths) -> None:
    """A run that dies while it writes over a complete checkpoint would damage it."""
    writer = open_writer()
    writer.save(state(), RunProgress(next_epoch=2))
    writer.wait()
    [folder] = paths.checkpoints.glob("epoch-*")
    before = (folder / "rest.pt").stat().st_mtime_ns
    for again in (writer, open_writer()):
        again.save(state(), RunProgress(next_epoch=2, search_samples=1))
        again.wait()
        assert (folder / "rest.pt").stat().st_mtime_ns == before


def test_progress_of_another_version_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no progress of this version"):
        RunProgress.from_json({"history": {"plans": ()}})
