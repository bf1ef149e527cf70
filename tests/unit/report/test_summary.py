"""Main numbers, sentences and warnings of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from raytrain_opt.report.run_reader import read_run
from raytrain_opt.report.summary import all_warnings, sentences, tiles
from tests.support.synthetic_runs import (
    epoch_line,
    evaluation,
    event_line,
    round_line,
    with_batch_size_search,
    write_lines,
    write_run,
)


def numbers(run_dir: Path) -> dict[str, list[str]]:
    return {name: values for name, *values in tiles(read_run(str(run_dir)))}


def text_of(run_dir: Path) -> str:
    return " ".join(sentences(read_run(str(run_dir))))


def warnings_of(run_dir: Path) -> list[str]:
    return all_warnings(read_run(str(run_dir)))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", epochs=4)


def test_the_main_numbers_and_the_cost_of_the_search_are_stated(run_dir: Path) -> None:
    assert numbers(run_dir) == {
        "Test accuracy": ["87.50 %", "best 87.50 % in epoch 4"],
        "Time": ["41.0 s", "since the start of the command"],
        "Speed": ["960 /s", "samples, median over epochs"],
        "Global batch size": ["64", "2 workers × 32"],
        "Learning rate": ["0.2", "highest"],
        "Search cost": ["75 %", "of the training's samples"],
    }
    assert text_of(run_dir).startswith(
        "The learning-rate search cost 3,840 samples (75 % of the training's samples) and 1.0 s "
        "(2.4 % of the run's time): 4 rounds, 12 candidates, trained on slots."
    )


def test_the_last_epoch_need_not_be_the_best(run_dir: Path) -> None:
    lines = [epoch_line(n, **evaluation(a)) for n, a in enumerate((0.5, 0.9, None, 0.7), 1)]
    write_lines(run_dir / "epochs.jsonl", lines)
    assert numbers(run_dir)["Test accuracy"] == ["70.00 %", "best 90.00 % in epoch 2"]


def test_a_given_schedule_has_no_search(tmp_path: Path) -> None:
    policy = {"learning_rate": {"policy": "schedule", "initial": 0.1}}
    run_dir = write_run(tmp_path / "run", rounds=False, job_changes=policy)
    assert text_of(run_dir).startswith("No learning-rate search took place.")
    assert numbers(run_dir)["Search cost"][0] == "none"


def test_a_peak_is_stated(run_dir: Path) -> None:
    peak = {"stage": "fine", "next_base_lr": 0.2, "kept_steps": 0}
    lines = [round_line(1, None, **peak), round_line(1, 1, **peak)]
    write_lines(run_dir / "rounds.jsonl", lines)
    assert "chose SGD with a peak learning rate of 0.2." in text_of(run_dir)


def test_the_batch_size_is_explained(run_dir: Path) -> None:
    text = text_of(with_batch_size_search(run_dir))
    assert "5 probes, 21.4 s) chose 128 samples per worker at 17,297 samples/s" in text


def epochs(**changes: Any) -> Callable[[Path], None]:
    return lambda run: write_lines(
        run / "epochs.jsonl", [epoch_line(n, **changes) for n in range(1, 5)]
    )


def rounds(lines: Iterable[dict[str, Any]]) -> Callable[[Path], None]:
    return lambda run: write_lines(run / "rounds.jsonl", lines)


def events(*lines: dict[str, Any]) -> Callable[[Path], None]:
    return lambda run: write_lines(run / "events.jsonl", lines)


def interrupted(*lines: dict[str, Any]) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / "result.json").unlink()
        write_lines(run / "events.jsonl", lines)

    return change


def with_failure(failure: str) -> dict[str, Any]:
    line = round_line(1)
    line["candidates"][0] |= {"status": "diverged", "score": None, "failure": failure}
    return line


SLOW = {"main_compute_s": 1.0, "main_data_wait_s": 0.25}
RESTARTED = event_line("restarted", "slot 1 was restarted", process="slot 1", silent_s=5.3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (epochs(timings_s=SLOW), "for data in 25 % of the main training's time"),
        (rounds([with_failure("ValueError: x")]), "1 candidate raised ValueError: x"),
        (
            rounds([round_line(1, stage="coarse", winner=None, next_base_lr=0.2)]),
            "The peak learning rate, 0.2, is at the edge of the rates that were tried (0.05 to",
        ),
        (epochs(skipped=2), "8 samples skipped"),
        (events(RESTARTED), "1 restart of processes: slot 1 (1 ×). The interrupted commands"),
        (events(event_line("lost", "rate 0.2 is left out")), "rate 0.2 is left out"),
        (events(event_line("fewer", "on 1 of 2 workers")), "on 1 of 2 workers"),
        (interrupted(), "4 of 4 epochs are done (it is still running, or its driver died)"),
        (interrupted(event_line("failed", "worker 1 is silent")), "(failed: worker 1 is silent)"),
        (
            interrupted(event_line("interrupted", "KeyboardInterrupt")),
            "(interrupted: KeyboardInterrupt)",
        ),
    ],
)
def test_a_warning_is_given(run_dir: Path, change: Callable[[Path], None], message: str) -> None:
    change(run_dir)
    [warning] = warnings_of(run_dir)
    assert message in warning


@pytest.mark.parametrize(
    "change",
    [
        epochs(timings_s={"main_compute_s": 1.0, "main_data_wait_s": 0.03}),
        events(event_line("resumed", "resumed after epoch 2")),
    ],
)
def test_no_warning_without_a_reason(run_dir: Path, change: Callable[[Path], None]) -> None:
    change(run_dir)
    assert warnings_of(run_dir) == []


def test_the_warning_of_an_unfinished_run_has_its_length_and_a_command_for_a_shell(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path / "my run", epochs=2, finished=False)
    job = run / "job.yaml"
    job.write_text(job.read_text().replace("epochs: 4", "train_for: 60.0"))
    [warning] = [w for w in warnings_of(run) if "not finished" in w]
    assert "2 of 4 epochs are done" in warning
    assert f"raytrain-opt run --resume '{run}' (and --trust if" in warning
