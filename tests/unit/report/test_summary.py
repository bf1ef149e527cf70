"""Numbers, sentences and warnings of a run's summary."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from raytrain_opt.report.run_reader import read_run
from raytrain_opt.report.summary import RunSummary, summarize
from tests.support.synthetic_runs import (
    STEP,
    VALIDATION_SAMPLES,
    epoch_line,
    evaluation,
    event_line,
    result,
    round_line,
    with_batch_size_search,
    write_lines,
    write_run,
)


def summary_of(run_dir: Path) -> RunSummary:
    return summarize(read_run(str(run_dir)))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", epochs=4)


def test_cost_and_gain_of_the_search_are_stated(run_dir: Path) -> None:
    write_lines(
        run_dir / "rounds.jsonl", [round_line(1, 0), *map(round_line, (2, 3)), round_line(4, 2)]
    )
    summary = summary_of(run_dir)
    assert (summary.search.rounds, summary.search.candidates, summary.search.samples) == (
        4,
        12,
        3840,
    )
    assert summary.search.samples_fraction == 0.75
    assert summary.search.duration_s == pytest.approx(1.0)
    assert summary.search.time_fraction == pytest.approx(1 / 41)
    cost, gain, *_ = summary.sentences
    assert "3,840 samples (75 % of the training's samples) and 1.0 s (2.4 %" in cost
    # Ten points above the unchanged rate when another one won, otherwise none.
    assert "changed the learning rate in 2 of 4 rounds" in gain
    assert "5.0 points" in gain


def test_the_last_epoch_need_not_be_the_best(run_dir: Path) -> None:
    lines = [epoch_line(n, **evaluation(a)) for n, a in enumerate((0.5, 0.9, None, 0.7), 1)]
    write_lines(run_dir / "epochs.jsonl", lines)
    summary = summary_of(run_dir)
    assert (summary.test_metric, summary.best_test_metric, summary.best_epoch) == (0.7, 0.9, 2)


def test_a_given_schedule_has_no_search(tmp_path: Path) -> None:
    policy = {"learning_rate": {"policy": "schedule", "initial": 0.1}}
    summary = summary_of(write_run(tmp_path / "run", rounds=False, job_changes=policy))
    assert "No learning-rate search" in summary.sentences[0]
    assert summary.search.rounds == 0


def test_a_peak_is_stated_with_its_factor(run_dir: Path) -> None:
    peak = {"stage": "fine", "next_base_lr": 0.2, "kept_steps": 0}
    write_lines(
        run_dir / "rounds.jsonl",
        [round_line(1, None, **peak), round_line(1, 1, **peak)],
    )
    text = " ".join(summary_of(run_dir).sentences)
    assert "a peak learning rate of 0.2, 2 times the initial guess of 0.1" in text


def test_the_batch_size_and_the_noise_scale_are_explained(run_dir: Path) -> None:
    text = " ".join(summary_of(with_batch_size_search(run_dir)).sentences)
    assert "5 probes, 21.4 s) chose 128 samples per worker at 17,297 samples/s" in text
    assert "Gradient noise scale: 310" in text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {},
            "A training step: bf16, TF32, cuDNN autotuning, channels_last, fused SGD, not "
            "compiled.",
        ),
        (
            {"precision": "fp32", "kernels": [], "loader_processes": 4},
            "A training step: fp32, channels_last, fused SGD, loader processes: 4, not compiled.",
        ),
        (
            {"compile": "default"},
            "compiled (default); the first step, which compiles, took 12.0 s.",
        ),
    ],
)
def test_what_was_chosen_for_the_step_is_stated(
    run_dir: Path, changes: dict[str, Any], text: str
) -> None:
    record = result(4)
    record["parallel"]["step"] = STEP | changes
    (run_dir / "result.json").write_text(json.dumps(record), encoding="utf-8")
    assert text in " ".join(summary_of(run_dir).sentences)


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


def close_round(epoch: int) -> dict[str, Any]:
    """Return a round whose best two candidates are one sample apart."""
    line = round_line(epoch)
    for index, candidate in enumerate(line["candidates"]):
        candidate["score"] = candidate["val_metric"] = 0.5 + (index == 1) / VALIDATION_SAMPLES
    return line


def by_loss(line: dict[str, Any]) -> dict[str, Any]:
    """Return the round with losses as scores, whose noise is not known."""
    for candidate in line["candidates"]:
        candidate["score"] = -candidate["val_loss"]
    return line


def with_candidate(status: str) -> dict[str, Any]:
    line = round_line(1)
    line["candidates"][0] |= {"status": status, "score": None, "val_metric": None}
    return line


SLOW = {"main_compute_s": 1.0, "main_data_wait_s": 0.25}
RESTARTED = event_line("restarted", "slot 1 was restarted", process="slot 1", silent_s=5.3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (epochs(timings_s=SLOW), "for data in 25 % of the main training's time"),
        (
            rounds(map(close_round, range(1, 5))),
            "In 4 of 4 rounds, the best and the second-best candidate differ by less",
        ),
        (rounds(round_line(n, 2) for n in range(1, 5)), "the lowest learning rate of the set"),
        (rounds(round_line(n, 0) for n in range(1, 5)), "the highest learning rate of the set"),
        (rounds([with_candidate("diverged")]), "1 candidate of 3 diverged"),
        (
            rounds([round_line(1, stage="coarse", winner=None, next_base_lr=0.2)]),
            "The peak learning rate, 0.2, is at the edge of the rates that were tried (0.05 to",
        ),
        (epochs(skipped=2), "8 samples skipped"),
        (
            epochs(staleness={"counts": [1, 0, 0, 0, 0, 0, 0, 3], "mean": 5.25, "max": 7}),
            "up to 7 updates stale, 5.25 on average",
        ),
        (events(RESTARTED), "1 restart of processes: slot 1 (1 ×). About 5.3 s passed"),
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
    [warning] = summary_of(run_dir).warnings
    assert message in warning


@pytest.mark.parametrize(
    "change",
    [
        epochs(timings_s={"main_compute_s": 1.0, "main_data_wait_s": 0.03}),
        # The winner is clearly better in half of the rounds.
        rounds([close_round(1), close_round(2), round_line(3), round_line(4)]),
        rounds([round_line(1, 0), round_line(2, 2), round_line(3), round_line(4)]),
        rounds(by_loss(close_round(epoch)) for epoch in range(1, 5)),
        epochs(staleness={"counts": [1, 3], "mean": 0.75, "max": 1}),
        events(event_line("resumed", "resumed after epoch 2")),
    ],
)
def test_no_warning_without_a_reason(run_dir: Path, change: Callable[[Path], None]) -> None:
    change(run_dir)
    assert summary_of(run_dir).warnings == ()


def test_the_warning_of_an_unfinished_run_has_its_length_and_a_command_for_a_shell(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path / "my run", epochs=2, finished=False)
    job = run / "job.yaml"
    job.write_text(job.read_text().replace("epochs: 4", "train_for: 60.0"))
    assert "It has no checkpoint" in " ".join(summary_of(run).warnings)
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "index.json").write_text("{}")
    [warning] = [w for w in summary_of(run).warnings if "not finished" in w]
    assert "2 of 4 epochs are done" in warning
    assert f"raytrain-opt run --resume '{run}' (and --trust if" in warning
