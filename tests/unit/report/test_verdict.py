"""What a verdict says, and of what it warns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from made_runs import (
    SELECTION,
    epoch_line,
    event_line,
    made_run,
    round_line,
    with_batch_size_search,
    write_lines,
)

from raytrain_opt.report import verdicts
from raytrain_opt.report.records import read_run
from raytrain_opt.report.verdict import Verdict, verdict_of


def verdict(run_dir: Path) -> Verdict:
    return verdict_of(read_run(str(run_dir)))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return made_run(tmp_path / "run", epochs=4)


def test_figures_first(run_dir: Path) -> None:
    found = verdict(run_dir)
    assert (found.status, found.epochs_done, found.epochs) == ("finished", 4, 4)
    assert found.test_accuracy == pytest.approx(0.875)
    assert (found.best_test_accuracy, found.best_epoch) == (found.test_accuracy, 4)
    assert found.wall_s == 41.0
    assert found.samples_per_s == 960.0
    assert (found.global_batch_size, found.batch_size_per_worker, found.workers) == (64, 32, 2)
    assert (found.lr_lowest, found.lr_highest) == (0.1, pytest.approx(0.12))
    assert found.data_wait_fraction == pytest.approx(0.06)
    assert found.warnings == ()


def test_the_search_is_said_to_cost_and_to_bring(run_dir: Path) -> None:
    write_lines(
        run_dir / "rounds.jsonl", [round_line(1, 0), *map(round_line, (2, 3)), round_line(4, 2)]
    )
    found = verdict(run_dir)
    assert (found.search.rounds, found.search.candidates, found.search.samples) == (4, 12, 3840)
    assert found.search.samples_fraction == 0.75
    assert found.search.seconds == pytest.approx(1.0)
    assert found.search.seconds_fraction == pytest.approx(1 / 41)
    cost, brought, *_ = found.sentences
    assert "3,840 samples, 75 % of the training's, and 1.0 s, 2.4 %" in cost
    # Ten points ahead of the unchanged rate where another won, none where it won itself.
    assert "changed the rate in 2 of 4 rounds" in brought
    assert "5.0 points" in brought


def test_the_last_epoch_need_not_be_the_best(run_dir: Path) -> None:
    lines = [epoch_line(n, test_accuracy=a) for n, a in enumerate((0.5, 0.9, None, 0.7), 1)]
    write_lines(run_dir / "epochs.jsonl", lines)
    found = verdict(run_dir)
    assert (found.test_accuracy, found.best_test_accuracy, found.best_epoch) == (0.7, 0.9, 2)


def test_a_written_schedule_has_no_search(tmp_path: Path) -> None:
    policy = {"learning_rate": {"policy": "schedule", "initial": 0.1}}
    found = verdict(made_run(tmp_path / "run", rounds=False, job_changes=policy))
    assert "No learning-rate search" in found.sentences[0]
    assert found.search.rounds == 0


def test_a_peak_that_was_searched_is_told_with_its_factor(run_dir: Path) -> None:
    peak = {"stage": "fine", "next_base_lr": 0.2, "kept_steps": 0}
    later = {"stage": "later", "next_base_lr": 0.1}
    write_lines(
        run_dir / "rounds.jsonl",
        [round_line(1, None, **peak), round_line(2, 0, **later), round_line(3, 1, **later)],
    )
    said = " ".join(verdict(run_dir).sentences)
    assert "a peak of 0.2, 2 times the initial guess of 0.1" in said
    assert "1 of 2 later rounds changed" in said


def test_the_batch_size_and_the_noise_scale_are_explained(run_dir: Path) -> None:
    said = " ".join(verdict(with_batch_size_search(run_dir)).sentences)
    assert "5 probes, 21.4 s) chose 128 per worker at 17,297 samples/s" in said
    assert "Gradient noise scale: 310 (280 to 340)" in said


def test_how_old_gradients_were_is_said(run_dir: Path) -> None:
    """Of 4 updates in each epoch one was 2 old."""
    epochs(staleness={"counts": [3, 0, 1], "mean": 0.5, "max": 2})(run_dir)
    said = " ".join(verdict(run_dir).sentences)
    assert "gradients were 0.5 updates old on average, at most 2" in said


def epochs(**changes: Any) -> Callable[[Path], None]:
    return lambda run: write_lines(
        run / "epochs.jsonl", [epoch_line(n, **changes) for n in range(1, 5)]
    )


def rounds(lines: Iterable[dict[str, Any]]) -> Callable[[Path], None]:
    return lambda run: write_lines(run / "rounds.jsonl", lines)


def events(*lines: dict[str, Any]) -> Callable[[Path], None]:
    return lambda run: write_lines(run / "events.jsonl", lines)


def cut(*lines: dict[str, Any]) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / "result.json").unlink()
        write_lines(run / "events.jsonl", lines)

    return change


def near(epoch: int) -> dict[str, Any]:
    """A round whose best two are one sample apart."""
    line = round_line(epoch)
    for index, candidate in enumerate(line["candidates"]):
        candidate["score"] = candidate["val_accuracy"] = 0.5 + (index == 1) / SELECTION
    return line


def by_loss(line: dict[str, Any]) -> dict[str, Any]:
    """The same round, scored by the loss, of whose noise nothing is known."""
    for candidate in line["candidates"]:
        candidate["score"] = -candidate["val_loss"]
    return line


def with_candidate(status: str) -> dict[str, Any]:
    line = round_line(1)
    line["candidates"][0] |= {"status": status, "score": None, "val_accuracy": None}
    return line


SLOW = {"main_compute_s": 1.0, "main_data_wait_s": 0.25}
RESTARTED = event_line("restarted", "slot 1 was started again", who="slot 1", cost_s=5.3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (epochs(parts_s=SLOW), "data in 25 % of the main training's steps"),
        (rounds(map(near, range(1, 5))), "In 4 of 4 rounds the best candidate was within noise"),
        (rounds(round_line(n, 2) for n in range(1, 5)), "the lowest learning rate of the set"),
        (rounds(round_line(n, 0) for n in range(1, 5)), "the highest learning rate of the set"),
        (rounds([with_candidate("diverged")]), "1 candidate of 3 diverged"),
        (
            rounds([round_line(1, stage="coarse", winner=None, next_base_lr=0.2)]),
            "The peak that was found, 0.2, is at the edge of the rates that were tried (0.05 to",
        ),
        (epochs(skipped=2), "8 samples could not be read"),
        (
            epochs(staleness={"counts": [1, 0, 0, 0, 3], "mean": 3.0, "max": 4}),
            "up to 4 updates old, 3 on average",
        ),
        (events(RESTARTED), "1 process started again: slot 1 (1 ×); about 5.3 s passed"),
        (events(event_line("lost", "rate 0.2 is left out")), "rate 0.2 is left out"),
        (events(event_line("fewer", "on 1 of 2 workers")), "on 1 of 2 workers"),
        (cut(), "4 of 4 epochs are done (it still goes on, or its driver died)"),
        (cut(event_line("failed", "worker 1 is silent")), "(failed: worker 1 is silent)"),
        (cut(event_line("interrupted", "KeyboardInterrupt")), "(interrupted: KeyboardInterrupt)"),
    ],
)
def test_a_warning_is_given(run_dir: Path, change: Callable[[Path], None], said: str) -> None:
    change(run_dir)
    [warning] = verdict(run_dir).warnings
    assert said in warning


@pytest.mark.parametrize(
    "change",
    [
        epochs(parts_s={"main_compute_s": 1.0, "main_data_wait_s": 0.09}),
        # The winner is clearly ahead in half of the rounds.
        rounds([near(1), near(2), round_line(3), round_line(4)]),
        rounds([round_line(1, 0), round_line(2, 2), round_line(3), round_line(4)]),
        rounds(by_loss(near(epoch)) for epoch in range(1, 5)),
        epochs(staleness={"counts": [1, 3], "mean": 0.75, "max": 1}),
        events(event_line("resumed", "resumed after epoch 2")),
    ],
)
def test_no_warning_where_all_is_well(run_dir: Path, change: Callable[[Path], None]) -> None:
    change(run_dir)
    assert verdict(run_dir).warnings == ()


def test_a_run_that_goes_on_has_a_verdict_of_what_is_there(tmp_path: Path) -> None:
    found = verdict(made_run(tmp_path / "run", epochs=2, finished=False))
    assert (found.status, found.epochs_done, found.epochs) == ("not finished", 2, 4)
    assert found.test_accuracy == 0.75
    assert found.search.samples is None


def test_verdicts_are_json_for_scripts(tmp_path: Path) -> None:
    places = [str(made_run(tmp_path / name)) for name in ("a", "b")]
    found = json.loads(json.dumps(verdicts(places), allow_nan=False))
    assert found["schema_version"] == 1
    assert [run["run_dir"] for run in found["runs"]] == places
