"""What a run writes down: valid JSON lines, and events that TensorBoard reads."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raytrain_opt.paths import RunPaths
from raytrain_opt.telemetry.records import EpochRecord, Recorder, versions

NAN, INF = float("nan"), float("inf")


def epoch(number: int = 1, **values: Any) -> EpochRecord:
    record: dict[str, Any] = {
        "lr": 0.1,
        "lr_first": 0.2,
        "train_loss": 0.5,
        "train_accuracy": 0.8,
        "test_loss": 0.6,
        "test_accuracy": 0.7,
        "test_top5": 0.9,
        "test_samples": 10,
        "workers": 2,
        "samples": 100,
        "samples_per_s": 50.0,
        "skipped": 0,
        "seconds": 2.0,
        "parts_s": {"main_train_s": 1.5},
    }
    return EpochRecord(number, **{**record, **values})


def round_(number: int = 1, *scores: float) -> dict[str, Any]:
    candidates = [{"index": i, "lr": 0.1, "score": score} for i, score in enumerate(scores)]
    return {"epoch": number, "base_lr": 0.1, "candidates": candidates, "winner": 0}


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths.create(str(tmp_path), "r")


@pytest.fixture
def recorder(paths: RunPaths) -> Iterator[Recorder]:
    made = Recorder(paths)
    yield made
    made.close()


def strict(text: str) -> Any:
    """As any JSON reader in the world reads it: NaN and Infinity are errors."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def lines(path: Path) -> list[Any]:
    return [strict(line) for line in path.read_text().splitlines()]


def test_an_epoch_is_a_line_with_all_its_values(recorder: Recorder, paths: RunPaths) -> None:
    recorder.epoch(epoch(1), 25)
    recorder.epoch(epoch(2, test_accuracy=None), 50)
    first, second = lines(paths.epochs)
    assert first == {"schema_version": 1, **vars(epoch(1))}
    assert (second["epoch"], second["test_accuracy"]) == (2, None)


def test_what_is_not_finite_becomes_null(recorder: Recorder, paths: RunPaths) -> None:
    recorder.epoch(epoch(train_loss=NAN, test_loss=INF, parts_s={"a": NAN, "b": 1.0}), 1)
    recorder.round(round_(1, -INF, 0.5), 0)
    recorder.result({"final": [{"loss": (NAN, 1.0)}], "n": 3})
    [line] = lines(paths.epochs)
    assert (line["train_loss"], line["test_loss"]) == (None, None)
    assert line["parts_s"] == {"a": None, "b": 1.0}
    assert [c["score"] for c in lines(paths.rounds)[0]["candidates"]] == [None, 0.5]
    assert strict(paths.result.read_text())["final"] == [{"loss": [None, 1.0]}]


def test_rounds_and_result_carry_the_schema_version(recorder: Recorder, paths: RunPaths) -> None:
    recorder.round(round_(1, 0.5), 0)
    recorder.result({"status": "finished"})
    assert lines(paths.rounds) == [{"schema_version": 1, **round_(1, 0.5)}]
    result = strict(paths.result.read_text())
    assert (result["schema_version"], result["status"]) == (1, "finished")
    assert result["finished_utc"].endswith("+00:00")


@pytest.mark.parametrize(("rounds", "epochs"), [(0, 0), (3, 1), (4, 2), (6, 3)])
def test_what_was_not_committed_is_forgotten(
    recorder: Recorder, paths: RunPaths, rounds: int, epochs: int
) -> None:
    """Also in the middle of an epoch, which has two rounds here."""
    for number in (1, 2, 3):
        recorder.round(round_(number, 0.1), 0)
        recorder.round(round_(number, 0.2), 0)
        recorder.epoch(epoch(number), number)
    before = lines(paths.rounds)
    recorder.forget_after(rounds, epochs)
    assert lines(paths.rounds) == before[:rounds]
    assert [line["epoch"] for line in lines(paths.epochs)] == [1, 2, 3][:epochs]
    recorder.epoch(epoch(9), 9)
    assert lines(paths.epochs)[-1]["epoch"] == 9


def test_forgetting_in_a_run_without_records_makes_none(
    recorder: Recorder, paths: RunPaths
) -> None:
    recorder.forget_after(0, 0)
    assert not paths.rounds.exists()
    assert not paths.epochs.exists()


def test_a_line_cut_off_by_a_crash_is_forgotten(recorder: Recorder, paths: RunPaths) -> None:
    recorder.epoch(epoch(1), 1)
    with paths.epochs.open("a") as file:
        file.write('{"schema_version": 1, "epo')
    recorder.forget_after(0, 2)
    assert [line["epoch"] for line in lines(paths.epochs)] == [1]


def events(paths: RunPaths) -> dict[str, tuple[int, float]]:
    """Step and value of each scalar, the last where there are several."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    [file] = paths.tensorboard.iterdir()
    found = {}
    for raw in RawEventFileLoader(str(file)).Load():
        event = Event.FromString(raw)
        for value in event.summary.value:
            found[value.tag] = (event.step, value.simple_value)
    return found


def test_tensorboard_reads_the_scalars(recorder: Recorder, paths: RunPaths) -> None:
    recorder.round(round_(2, 0.25, -INF), 10)
    recorder.epoch(epoch(2, test_top5=None), 20)
    recorder.close()
    found = events(paths)
    assert found["round/candidate_0/score"] == (10, 0.25)
    assert "round/candidate_1/score" not in found
    assert found["epoch/train_loss"] == (20, 0.5)
    assert found["epoch/samples_per_s"] == (20, 50.0)
    assert "epoch/test_top5" not in found
    assert "epoch/noise_scale" not in found


def test_tensorboard_sees_rounds_and_epochs_while_the_run_goes_on(
    recorder: Recorder, paths: RunPaths
) -> None:
    line = round_(2, 0.25)
    line["candidates"][0]["val_loss"] = 1.5
    recorder.round({**line, "next_base_lr": 0.2}, 10)
    recorder.epoch(epoch(2), 20)
    deadline_s = time.monotonic() + 60
    while "epoch/train_loss" not in events(paths) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    found = events(paths)
    assert found["round/candidate_0/val_loss"] == (10, 1.5)
    assert found["round/next_base_lr"] == (10, pytest.approx(0.2))
    assert found["epoch/train_loss"] == (20, 0.5)


def test_a_noise_scale_is_a_scalar_where_it_is_finite(recorder: Recorder, paths: RunPaths) -> None:
    recorder.epoch(epoch(1, noise_scale={"value": 812.0, "high": INF}), 10)
    recorder.epoch(epoch(2, noise_scale={"value": INF, "high": INF}), 20)
    recorder.close()
    assert [line["noise_scale"]["value"] for line in lines(paths.epochs)] == [812.0, None]
    assert events(paths)["epoch/noise_scale"] == (10, 812.0)


def test_versions_are_of_what_decides_the_numbers() -> None:
    found = versions()
    assert set(found) == {"python", "raytrain_opt", "ray", "torch", "torchvision", "numpy"}
    assert all(text[0].isdigit() for text in found.values())
