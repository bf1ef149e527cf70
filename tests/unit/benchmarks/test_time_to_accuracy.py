"""The comparison benchmark: every row is computed and counts what was trained for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import comparison_command, comparison_tasks, comparison_units, in_process
from benchmarks import comparison_rows as rows_of
from benchmarks import time_to_accuracy as benchmark
from benchmarks.comparison_kinds import KINDS
from benchmarks.comparison_tasks import (
    OPTIMIZERS,
    OTHER_DATA,
    SYNTHETIC,
    TASKS,
    Task,
)
from benchmarks.comparison_units import Cache, Result, Setting, Unit, compute
from raytrain_opt.config.schema import Job
from raytrain_opt.driver import train
from raytrain_opt.models import build_model
from raytrain_opt.results import TrainTotals
from raytrain_opt.search.fixed_schedule import RecordedSchedule
from raytrain_opt.train.learner import Learner

OURS = {"policy": "stpt_horizon"}
EPOCHS = 4


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(SYNTHETIC, 0, EPOCHS, SYNTHETIC.prepare(Path(), tmp_path))


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Samples of each phase that a learner trained."""
    samples: list[int] = []
    original = Learner.train

    def counted(self: Learner, *args: Any, **kwargs: Any) -> TrainTotals:
        totals = original(self, *args, **kwargs)
        samples.append(totals.samples)
        return totals

    monkeypatch.setattr(Learner, "train", counted)
    return samples


def one_training() -> int:
    return EPOCHS * (SYNTHETIC.train + SYNTHETIC.validation)


def row_names(*kinds: str) -> list[str]:
    """Return the names of the rows whose trainings are of these kinds."""
    setting = Setting(SYNTHETIC, 0, EPOCHS, {})
    return [n for n, row in rows_of.rows(OURS).items() if row.units(setting)[0].kind in kinds]


def computed_here(units: Sequence[Unit], _processes: int) -> Iterator[tuple[Unit, Result]]:
    for unit in units:
        yield unit, compute(unit)


# Trainings.


@pytest.mark.parametrize("name", row_names("train"))
def test_a_row_counts_every_sample_that_was_trained(
    name: str, setting: Setting, trained: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # So short a training has no search, which would lower a start at 10: it diverges.
    monkeypatch.setattr(rows_of, "WRONG_START_FACTOR", 10.0)
    units = rows_of.rows(OURS)[name].units(setting)
    results = [compute(unit) for unit in units]
    assert sum(result["samples"] for result in results) == sum(trained)
    row = rows_of.outcome(rows_of.rows(OURS)[name], results, 0.0, setting.training_samples)
    assert row["trainings"] == sum(trained) / one_training()
    assert sum(trained) >= len(units) * EPOCHS * SYNTHETIC.train
    # Evaluated from the first quarter of the training on.
    evaluated = sum(4 * epoch >= EPOCHS for epoch in range(1, EPOCHS + 1))
    assert all(len(result["curve"]) == evaluated for result in results)
    assert [p["samples"] for p in results[0]["curve"]][-1] == results[0]["samples"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", row_names("lr_find"))
def test_another_packages_row_counts_every_sample(
    name: str, setting: Setting, trained: list[int]
) -> None:
    unit = rows_of.rows(OURS)[name].units(setting)[0]
    pytest.importorskip("lightning")
    result = compute(unit)
    searched = result["search_samples"]
    assert result["samples"] == sum(trained) + searched
    # The range test is 100 updates at most, by Lightning's trainer and not the learner's.
    assert 0 < searched <= 100 * SYNTHETIC.batch
    assert result["curve"][-1]["samples"] == result["samples"]


def test_stpt_pays_for_its_candidates_once(setting: Setting) -> None:
    """Eight candidates of 8 % of each epoch; the winner's 8 % are part of the training."""
    [unit] = rows_of.rows(OURS)["stpt"].units(setting)
    result = compute(unit)
    steps = SYNTHETIC.train // SYNTHETIC.batch
    alpha = round(0.08 * steps)
    # No warm-up: 4 / 40 of 4 epochs are none.
    assert result["search_samples"] == EPOCHS * 7 * alpha * SYNTHETIC.batch
    assert result["samples"] == EPOCHS * SYNTHETIC.train + result["search_samples"]


def test_the_search_affects_the_weights_only_through_the_rates_it_chose(
    setting: Setting,
) -> None:
    """Replaying the chosen rates gives the same weights, bit by bit."""
    section = {"policy": "stpt", "candidates": [0.5, 2.0], "alpha": 3, "initial": 0.05}
    job = Job.model_validate(Unit("it", "train", setting, section).job)
    resolved = in_process.resolve_here(job)
    searched, replayed = (
        in_process.ObservedRun(resolved, in_process.open_learner(job)) for _ in range(2)
    )
    train(searched)
    ends = [searched.steps.before(epoch) for epoch in range(1, EPOCHS + 2)]
    lrs = tuple(searched.lrs[first:end] for first, end in pairwise(ends))
    no = (False,) * EPOCHS
    recorded = RecordedSchedule(lrs, (1.0,) * EPOCHS, tuple(map(len, lrs)), (0,) * EPOCHS, no)
    replayed.policy = recorded.policy(EPOCHS, replayed.steps)
    train(replayed)
    assert len(set(searched.lrs)) > 1
    ends = [run.reporter.learner.state(copy=True).digest() for run in (searched, replayed)]
    assert ends[0] == ends[1]
    assert searched.progress.samples > replayed.progress.samples == EPOCHS * SYNTHETIC.train


def test_no_row_chooses_by_the_test_split(setting: Setting, tmp_path: Path) -> None:
    """Other test labels change only the test accuracy."""
    labels = np.load(setting.data["test"][1])
    wrong = tmp_path / "wrong.npy"
    np.save(wrong, (labels + 1) % 4)
    data = {**setting.data, "test": [setting.data["test"][0], str(wrong)]}
    [original, relabeled] = [
        compute(Unit("stpt", "train", Setting(SYNTHETIC, 0, EPOCHS, section), {"policy": "stpt"}))
        for section in (setting.data, data)
    ]
    same = ("validation_accuracy", "samples", "peak_lr", "notes")
    assert {key: original[key] for key in same} == {key: relabeled[key] for key in same}
    assert original["accuracy"] > 0.5 > relabeled["accuracy"]


def test_a_diverged_training_counts_as_guessing(setting: Setting) -> None:
    section = {"policy": "schedule", "shape": "constant", "initial": 1e30}
    result = compute(Unit("diverges", "train", setting, section))
    assert "the training loss is nan" in result["diverged"]
    assert result["accuracy"] == result["validation_accuracy"] == 1 / 4
    assert 0 < result["samples"] <= SYNTHETIC.train
    assert result["curve"] == []


# Ray Tune's searches, without Ray.


@pytest.mark.parametrize("kind", ["asha", "pbt"])
def test_a_trial_is_the_training_at_its_rate(setting: Setting, kind: str) -> None:
    from benchmarks.comparison_tune import Trial

    [unit] = rows_of.rows(OURS)[kind].units(setting)
    config = {"job": unit.job, "lr": 0.2, "constant": kind == "pbt"}
    trial = Trial.__new__(Trial)  # without what Ray sets up
    trial.setup(config)
    lines = [trial.step() for _ in range(EPOCHS)]
    shape = "constant" if kind == "pbt" else "cosine"
    section = {"policy": "schedule", "shape": shape, "initial": 0.2}
    alone = compute(Unit("alone", "train", setting, section))
    assert lines[-1]["test_accuracy"] == alone["accuracy"]
    assert lines[-1]["validation_accuracy"] == alone["validation_accuracy"]
    assert sum(line["samples"] for line in lines) == alone["samples"]
    assert trial.reset_config({**config, "lr": 0.1})
    assert trial.step()["epoch"] == 1


def test_a_search_takes_its_best_trial_and_counts_all() -> None:
    from benchmarks.comparison_tune import Ledger

    def result(epoch: int, lr: float, validation: float, test: float) -> dict[str, Any]:
        common = {"epoch": epoch, "samples": 10, "reporting_s": 0.0, "config": {"lr": lr}}
        return {
            **common,
            "validation_accuracy": validation,
            "glance": [test],
            "test_accuracy": test,
        }

    ledger = Ledger(epochs=2, limit=6)
    assert not ledger("a", result(1, 0.1, 0.3, 0.3))
    assert not ledger("b", result(1, 0.2, 0.9, 0.9))  # stopped before its last epoch
    assert ledger("a", result(2, 0.1, 0.5, 0.8))
    assert not ledger("c", result(1, 0.3, 0.4, 0.2))
    assert not ledger.stop_all()
    assert ledger("c", result(2, 0.3, 0.6, 0.4))
    assert not ledger("d", result(1, 0.4, 0.1, 0.1))
    assert ledger.stop_all()
    outcome = ledger.outcome()
    assert (outcome.accuracy, outcome.validation_accuracy, outcome.peak_lr) == (0.4, 0.6, 0.3)
    assert outcome.samples == outcome.search_samples == 60
    assert [(point.samples, point.accuracy) for point in outcome.curve] == [(40, 0.2), (50, 0.4)]


# Rows.


def result(accuracy: float, validation: float = 0.0, samples: int = 100) -> Result:
    half = {"samples": samples // 2, "seconds": 1.0, "accuracy": accuracy / 2}
    end = {"samples": samples, "seconds": 2.0, "accuracy": accuracy}
    return {
        "accuracy": accuracy,
        "validation_accuracy": validation,
        "samples": samples,
        "seconds": 2.0,
        "peak_lr": accuracy,
        "curve": [half, end],
    }


def test_an_oracle_chooses_by_the_test_split_and_a_grid_does_not() -> None:
    results = [
        result(0.2, validation=0.3),
        result(0.4, validation=0.1),
        result(0.3, validation=0.2),
    ]
    rows = rows_of.rows(OURS)
    oracle = rows_of.outcome(rows["cosine_oracle"], results, 0.15, 100)
    grid = rows_of.outcome(rows["cosine_grid"], results, 0.15, 100)
    assert (oracle["accuracy"], grid["accuracy"]) == (40, 20)
    assert oracle["trainings"] == grid["trainings"] == 3
    assert oracle["reach"] == {"trainings": 2.5, "seconds": 5.0}
    assert grid["reach"] == {"trainings": 3.0, "seconds": 6.0}


def test_a_row_averages_over_seeds_and_its_reach_over_those_that_got_there() -> None:
    row = rows_of.rows(OURS)["ours"]
    results = (result(0.5), result(0.1, samples=200))
    outcomes = [rows_of.outcome(row, [r], 0.3, 100) for r in results]
    row_record = rows_of.over_seeds(outcomes)
    assert (
        row_record["accuracy_mean"],
        row_record["accuracy_min"],
        row_record["accuracy_max"],
    ) == (30, 10, 50)
    assert row_record["trainings"] == 1.5
    assert (row_record["reached"], row_record["reach_trainings"], row_record["reach_seconds"]) == (
        1,
        1.0,
        2.0,
    )


def test_the_summary_compares_with_the_better_of_two_in_each_task() -> None:
    def record(accuracy: float, trainings: float = 1.0) -> dict[str, float]:
        reach = {"reach_trainings": trainings / 2}
        return {"accuracy_mean": accuracy, "trainings": trainings, **reach, "undecided": 1}

    table = {
        "one": {
            "ours": record(50, 1.2),
            "cosine_oracle": record(51),
            "linear_oracle": record(49),
            "ours_start_too_small": record(48),
        },
        "two": {"ours": record(30, 1.1), "cosine_oracle": record(27), "linear_oracle": record(28)},
    }
    summary = rows_of.summary(table)
    assert summary["ours_minus_oracle_points"] == pytest.approx(0.5)
    assert summary["by_task"]["ours_minus_oracle_points"] == {"one": -1, "two": 2}
    assert summary["ours_minus_stpt_points"] is None
    assert summary["ours_samples_ratio"] == pytest.approx(1.15)
    assert summary["reach_trainings"] == pytest.approx(0.575)
    assert (summary["tasks"], summary["undecided"]) == (2, 2)
    assert summary["worst_task_points"] is None
    assert summary["by_task"]["reach_trainings"] == {"one": 0.6, "two": 0.55}
    assert summary["wrong_start"]["one"] == {"too_small": -2, "too_large": None}


@pytest.mark.parametrize(
    ("key", "others"),
    [
        ("ours_minus_everything_points", ["everything"]),
        ("ours_minus_users_points", ["users"]),
        ("ours_minus_sgd_grid_points", ["cosine_oracle", "linear_oracle"]),
        ("ours_minus_schedulefree_points", ["schedulefree_default", "schedulefree_oracle"]),
    ],
)
def test_the_summary_compares_with_each_rival_in_the_mean_and_by_task(
    key: str, others: list[str]
) -> None:
    def rows(ours: float, best: float) -> dict[str, dict[str, Any]]:
        """The last of the rivals is the best one; a row that is not theirs is better still."""
        accuracies = {"ours": ours, "muon_oracle": 99.0}
        accuracies |= {name: best - n for n, name in enumerate(reversed(others))}
        extra = {"trainings": 1.0, "reach_trainings": None, "accuracies": [0.0]}
        return {name: {"accuracy_mean": value, **extra} for name, value in accuracies.items()}

    table = {"one": rows(50, 51), "two": rows(30, 27), "without": rows(30, 0)}
    del table["without"][others[-1]]
    summary = rows_of.summary(table)
    assert summary[key] == 1
    assert summary["by_task"][key] == {"one": -1, "two": 3}
    is_worst = key in ("ours_minus_everything_points", "ours_minus_users_points")
    assert summary["worst_task_points"] == (-1 if is_worst else None)


def test_best_of_everything_is_the_best_fixed_schedule_of_all_families(setting: Setting) -> None:
    rows = rows_of.rows(OURS)
    units = rows["everything"].units(setting)
    assert len({unit.key for unit in units}) == len(units) == 27
    keys = {unit.key for unit in units}
    for name in ("cosine_oracle", "linear_oracle", "schedulefree_oracle", "muon_oracle"):
        assert {unit.key for unit in rows[name].units(setting)} < keys
    results = [result(0.01 * number, validation=-number) for number in range(27)]
    assert rows_of.outcome(rows["everything"], results, 0.0, 100)["accuracy"] == 26


def test_the_standard_error_pools_both_rows_over_the_seeds() -> None:
    ours = {"accuracy_mean": 51, "accuracies": [50, 52], "trainings": 1, "reach_trainings": None}
    table = {"one": {"ours": ours, "users": {**ours, "accuracies": [49, 53]}}}
    # Variances of 2 and 8.
    assert rows_of.summary(table)["by_task"]["standard_error"]["one"] == pytest.approx(1.581)


def test_what_users_take_are_13_trainings_with_a_warm_up(setting: Setting) -> None:
    task = replace(SYNTHETIC, epochs=4)
    units = rows_of.rows(OURS)["users"].units(replace(setting, task=task))
    assert len({unit.key for unit in units}) == len(units) == 13
    assert {unit.learning_rate["warmup"]["epochs"] for unit in units} == {1}


@pytest.mark.parametrize("kind", ["encoder_600", "table", "segmentation"])
def test_a_task_with_data_of_its_own_trains(kind: str, tmp_path: Path) -> None:
    task = replace(KINDS[f"{kind}@100"], train=96, validation=24, batch=32, epochs=1)
    setting = Setting(task, 0, 1, task.prepare(tmp_path, tmp_path))
    section = {"policy": "schedule", "shape": "constant", "initial": 0.01}
    result = compute(Unit("it", "train", setting, section, holds_out=False))
    assert 0 < result["accuracy"] < 1
    assert result["samples"] == 96
    assert len(result["curve"]) == 1


def test_the_lengths_of_a_kind_are_about_what_its_name_says() -> None:
    for name, task in KINDS.items():
        updates = int(name.partition("@")[2])
        made = (task.epochs or 0) * ((task.train + task.validation) // task.batch)
        assert 0.85 < made / updates < 1.2, name
        assert 16 <= task.batch <= 256


# The command.


def test_an_interrupted_comparison_continues_from_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(comparison_command, "compute_all", computed_here)
    file = tmp_path / "cache.jsonl"
    options = ["--tasks", "synthetic", "--epochs", "2", "--seeds", "2", "--cache", str(file)]
    arguments = ["time_to_accuracy.py", *options, "--rows", "cosine_default", "linear_default"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(benchmark, "_versions", dict)  # Lightning may be missing
    benchmark.main()
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][: len(lines[-1]) // 2])
    benchmark.main()
    output = capsys.readouterr().out
    second = json.loads(output.splitlines()[-1])
    assert output.count(" trainings, ") == 1  # only the one with half a line left
    accuracies = {n: row["accuracies"] for n, row in first["tasks"]["synthetic"].items()}
    assert {n: row["accuracies"] for n, row in second["tasks"]["synthetic"].items()} == accuracies
    assert accuracies.keys() == {"cosine_default", "linear_default"}


def test_results_of_one_setting_are_not_used_for_another(
    tmp_path: Path, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache([], tmp_path / "cache.jsonl")

    def units(setting: Setting) -> list[Unit]:
        return [row.units(setting)[0] for row in rows_of.rows(OURS).values()]

    for unit in units(setting):
        cache.add(unit, {})
    cache = Cache([tmp_path / "cache.jsonl"], None)
    assert not comparison_units.missing(units(setting), cache)
    larger = Setting(SYNTHETIC.scaled(2), 0, EPOCHS, setting.data)
    longer = Setting(SYNTHETIC, 0, EPOCHS + 1, setting.data)
    for other in (larger, longer, Setting(SYNTHETIC, 1, EPOCHS, setting.data)):
        missing = comparison_units.missing(units(other), cache)
        # Two rows begin with cosine 0.025, two with linear 0.025, the others with their own.
        assert len(missing) == len({unit.key for unit in units(other)})
    monkeypatch.setattr(comparison_units, "_policy_digest", lambda policy: policy)
    changed = {unit.name for unit in comparison_units.missing(units(setting), cache)}
    assert {"ours", "stpt"} <= changed


def test_real_tasks_need_their_data(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark._arguments(["--tasks", next(iter(TASKS))])
    assert "--data-root" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["SGD", "AdamW", "LARS", "Muon"])
def test_rows_train_with_the_optimizer_and_a_grid_around_its_customary_rate(
    name: str, setting: Setting
) -> None:
    _, customary = OPTIMIZERS[name]
    units = rows_of.rows(OURS)["cosine_oracle"].units(replace(setting, optimizer=name))
    jobs = [Job.model_validate(unit.job) for unit in units]
    assert {job.optimizer.name for job in jobs} == {name}
    rates = [job.learning_rate.initial for job in jobs]
    assert customary in rates
    assert (min(rates), max(rates)) == (customary / 4, customary * 8)


def test_rows_of_other_packages_need_sgd(capsys: pytest.CaptureFixture[str]) -> None:
    others = benchmark._arguments(["--tasks", "synthetic", "--optimizer", "AdamW"]).rows
    assert {"ours", "stpt", "cosine_grid"} <= {*others} < {*rows_of.rows(OURS)}
    with pytest.raises(SystemExit):
        benchmark._arguments(
            ["--tasks", "synthetic", "--optimizer", "LARS", "--rows", "asha", "ours"]
        )
    assert "only with SGD: asha" in capsys.readouterr().err


def test_missing_data_are_named(tmp_path: Path) -> None:
    for task in TASKS.values():
        with pytest.raises(SystemExit, match="does not exist"):
            task.prepare(tmp_path, tmp_path / "prepared")


KNOWN_SETS = [task for task in benchmark.ALL_TASKS.values() if ":" not in task.source]


@pytest.mark.parametrize("task", KNOWN_SETS, ids=lambda t: t.name)
def test_the_network_of_each_task_takes_its_images(task: Task) -> None:
    channels = 1 if task.source.startswith("fashion_mnist") else 3
    shape = (32,) if task.source == "text" else (channels, task.side, task.side)
    job = Job.model_validate(task.job({"name": "digits"}, 1, 0, {"policy": "stpt_horizon"}))
    model = build_model(job.model, num_classes=20, sample_shape=shape, seed=0)
    assert model(torch.zeros(2, *shape)).shape == (2, 20)


Arrays = tuple[np.ndarray[Any, Any], ...]


def prepare(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Arrays:
    """Return x, y of the training and of the test set, whose images are numbers of 10 classes."""

    def numbered(root: Path, side: int, coarse: bool = True) -> Any:
        assert coarse
        y = np.arange(4100) % 10
        x = np.arange(4100 * side * side).reshape(-1, side, side, 1)
        return (x, y), (x[:100], y[:100])

    for reader in ("read_cifar100", "read_fashion_mnist"):
        monkeypatch.setattr(comparison_tasks, reader, numbered)
    task = replace(OTHER_DATA[name], train=100, validation=20)
    data = task.prepare(Path(), folder)
    return tuple(np.load(path) for path in (*data["train"], *data["test"]))


@pytest.mark.parametrize("name", ["noisy_fashion", "noisy_coarse"])
def test_forty_percent_of_the_training_labels_are_random(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, test_x, test_y = prepare(name, tmp_path, monkeypatch)
    side = OTHER_DATA[name].side
    true = x[:, 0, 0, 0] // side**2 % 10
    assert 0.2 < np.mean(y != true) < 0.5  # a tenth of the random ones are right
    assert np.array_equal(test_y, test_x[:, 0, 0, 0] // side**2 % 10)


def test_a_long_tail_has_few_images_of_the_last_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, y, _, test_y = prepare("long_tail_coarse", tmp_path, monkeypatch)
    counts = np.bincount(y, minlength=10)
    assert counts[:3].sum() > 4 * counts[-3:].sum()
    assert set(np.bincount(test_y)) == {10}


def test_the_label_of_a_rotated_image_is_its_number_of_quarter_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, *_ = prepare("rotations_16", tmp_path, monkeypatch)
    assert set(y) == {0, 1, 2, 3}
    for image, turns in zip(x, y, strict=True):
        rows = np.rot90(image, -turns)[..., 0]
        assert np.array_equal(rows, rows.min() + np.arange(rows.size).reshape(rows.shape))


def test_texts_are_pieces_and_the_character_that_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, test_x, test_y = prepare("text_gru", tmp_path, monkeypatch)
    assert x.shape == (120, 32)
    assert x.dtype == np.float32
    assert {*y, *test_y, *x.flat, *test_x.flat} <= set(range(32))
    repeated = test_x[:, 20:]  # one piece in twenty
    assert np.array_equal(repeated[:-1], test_x[1:, :12])
    assert np.array_equal(test_y[:-1], test_x[1:, 12])
