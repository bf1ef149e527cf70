"""The rows of the comparison: the trainings of each row, and how they are summarized."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, variance
from typing import Any

from benchmarks.common import JOBS
from benchmarks.comparison_tasks import OPTIMIZERS
from benchmarks.comparison_units import Result, Setting, Unit
from raytrain_opt.config.load import load_job

# Factors of the optimizer's customary rate; 1 is among them, so that training is computed once.
GRID = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
# Ours does not know the optimizer's customary rate and starts from this one.
DEFAULT_LR = 0.1
# Lower rates of schedule-free SGD lose by points here.
SCHEDULEFREE_SGD_GRID = (1.0, 3.0, 10.0)
SCHEDULEFREE_ADAMW_GRID = (1.0, 4.0)
MUON_GRID = (0.5, 1.0, 2.0, 4.0)
WARMUP = 0.1
WRONG_START_FACTOR = 100.0
# Yamada et al., table 1: 200 of 2,500 iterations of pre-training; 4 of 40 epochs of warm-up. Rates
# and the rest of the setting are those of the job.
STPT_FILE = "imagenet_resnet50_stpt_mix.yaml"
STPT_ALPHA = 200 / 2500
STPT_WARMUP_FRACTION = 4 / 40

Units = Callable[[Setting], list[Unit]]
# Return the index of the result that counts, of the results of a row's units.
Choice = Callable[[Sequence[Result]], int]


@dataclass(frozen=True)
class Row:
    """One or several trainings for a setting; `choice` picks one, all count as cost.

    `only_sgd`: a row that is not computed when the optimizer of all rows is another.
    """

    title: str
    units: Units
    choice: Choice = lambda _: 0
    only_sgd: bool = False


def by_test(results: Sequence[Result]) -> int:
    """Choose as an oracle does: nobody who trains has the test split."""
    return max(range(len(results)), key=lambda i: results[i]["accuracy"])


def by_validation(results: Sequence[Result]) -> int:
    """Choose as anybody can."""
    return max(range(len(results)), key=lambda i: results[i]["validation_accuracy"])


def rows(ours: Mapping[str, Any]) -> dict[str, Row]:
    """Return all rows by name; `ours` is the learning_rate section of the contender."""
    low, high = DEFAULT_LR / WRONG_START_FACTOR, DEFAULT_LR * WRONG_START_FACTOR
    cosine, linear = _grid("cosine"), _grid("linear")
    cosine_held_out, linear_held_out = _grid("cosine", True), _grid("linear", True)
    return {
        "ours": Row("ours", lambda s: [_ours(s, ours)]),
        "stpt": Row("STPT as published, Mix, alpha 8 %", lambda s: [_stpt(s)]),
        "cosine_default": Row("cosine, customary rate", lambda s: [_schedule(s, "cosine", 1.0)]),
        "linear_default": Row("linear, customary rate", lambda s: [_schedule(s, "linear", 1.0)]),
        "cosine_oracle": Row("cosine, best of 6 on test", cosine, by_test),
        "linear_oracle": Row("linear, best of 6 on test", linear, by_test),
        "cosine_grid": Row("cosine, best of 6 on validation", cosine_held_out, by_validation),
        "linear_grid": Row("linear, best of 6 on validation", linear_held_out, by_validation),
        "schedulefree_default": Row(
            "schedule-free SGD 1.0",
            lambda s: [_schedulefree(s, "ScheduleFreeSGD", 1)],
            only_sgd=True,
        ),
        "schedulefree_oracle": Row(
            "schedule-free SGD, best of 3 on test", _schedulefree_sgd, by_test, only_sgd=True
        ),
        "schedulefree_adamw_default": Row(
            "schedule-free AdamW 0.0025",
            lambda s: [_schedulefree(s, "ScheduleFreeAdamW", 1)],
            only_sgd=True,
        ),
        "schedulefree_adamw_oracle": Row(
            "schedule-free AdamW, best of 2 on test", _schedulefree_adamw, by_test, only_sgd=True
        ),
        "muon_oracle": Row("Muon, linear, best of 4 on test", _muon, by_test, only_sgd=True),
        "adamw_oracle": Row("AdamW, linear, best of 6 on test", _adamw, by_test, only_sgd=True),
        "everything": Row(
            "best of everything by test",
            lambda s: [unit for units in _FAMILIES for unit in units(s)],
            by_test,
            only_sgd=True,
        ),
        "users": Row("best of 13 that users take, by test", _of_users, by_test, only_sgd=True),
        "ours_start_too_small": Row(
            "ours, start 100 x too small", lambda s: [_ours(s, {**ours, "initial": low})]
        ),
        "ours_start_too_large": Row(
            "ours, start 100 x too large", lambda s: [_ours(s, {**ours, "initial": high})]
        ),
    }


def _ours(setting: Setting, section: Mapping[str, Any]) -> Unit:
    start = f" from {section['initial']:g}" if "initial" in section else ""
    return Unit(f"ours{start}", setting, section, optimizer=setting.optimizer)


def _stpt(setting: Setting) -> Unit:
    """Return the training with the learning_rate section of the paper's job, for this length."""
    length = (
        f"epochs={setting.epochs}",
        f"learning_rate.alpha={STPT_ALPHA}",
        f"learning_rate.warmup.epochs={round(STPT_WARMUP_FRACTION * setting.epochs)}",
    )
    job = load_job(JOBS / STPT_FILE, length)
    section = job.learning_rate.model_dump(mode="json", exclude_unset=True)
    return Unit("stpt", setting, section, optimizer=_of_schedules(setting))


def _of_schedules(setting: Setting) -> str:
    """Return the optimizer of the rows that need a name."""
    return "SGD" if setting.optimizer == "auto" else setting.optimizer


def _section(setting: Setting, shape: str, lr: float) -> dict[str, Any]:
    few = 1 if setting.task.epochs and setting.epochs > 2 else 0
    warmup = {"epochs": max(few, round(WARMUP * setting.epochs))}
    return {"policy": "schedule", "shape": shape, "initial": lr, "warmup": warmup}


def _schedule(
    setting: Setting,
    shape: str,
    times: float,
    optimizer: str | None = None,
    *,
    holds_out: bool = False,
) -> Unit:
    """Return a training at this many times the optimizer's customary rate."""
    optimizer = optimizer or _of_schedules(setting)
    lr = round(times * OPTIMIZERS[optimizer][1], 6)
    return Unit(
        f"{optimizer} {shape} {lr:g}",
        setting,
        _section(setting, shape, lr),
        optimizer=optimizer,
        holds_out=holds_out,
    )


def _grid(shape: str, holds_out: bool = False) -> Units:
    return lambda setting: [
        _schedule(setting, shape, times, holds_out=holds_out) for times in GRID
    ]


def _schedulefree(setting: Setting, optimizer: str, times: float) -> Unit:
    return _schedule(setting, "constant", times, optimizer)


def _schedulefree_sgd(setting: Setting) -> list[Unit]:
    return [_schedulefree(setting, "ScheduleFreeSGD", f) for f in SCHEDULEFREE_SGD_GRID]


def _schedulefree_adamw(setting: Setting) -> list[Unit]:
    return [_schedulefree(setting, "ScheduleFreeAdamW", f) for f in SCHEDULEFREE_ADAMW_GRID]


def _muon(setting: Setting) -> list[Unit]:
    return [_schedule(setting, "linear", times, "Muon") for times in MUON_GRID]


def _adamw(setting: Setting) -> list[Unit]:
    return [_schedule(setting, "linear", times, "AdamW") for times in GRID]


# Every training of a fixed schedule: the best one by test is what a user could have found.
_FAMILIES: tuple[Units, ...] = (
    _grid("cosine"),
    _grid("linear"),
    _schedulefree_sgd,
    _schedulefree_adamw,
    _muon,
    _adamw,
)


def _of_users(setting: Setting) -> list[Unit]:
    """Return what people take for their networks: cosine with a warm-up, or no schedule."""
    grids = {"AdamWDecay": (0.3, 1, 3, 10), "SGD": (0.1, 0.3, 1, 3), "MuonAdamW": (0.1, 0.3, 1)}
    decays = [
        _schedule(setting, "cosine", times, optimizer)
        for optimizer, grid in grids.items()
        for times in grid
    ]
    return [*decays, *_schedulefree_adamw(setting)]


def target_of(result: Result) -> float:
    """Return the accuracy to reach: that of this training after its last epoch."""
    curve = result["curve"]
    # Anything beats a training that diverged.
    return curve[-1]["accuracy"] if curve and not result["diverged"] else 0.0


def outcome(row: Row, results: Sequence[Result], target: float, training: int) -> Result:
    """Return a row for one seed.

    `target` is the accuracy to reach, `training` the number of samples of one training.
    """
    index = row.choice(results)
    winner = results[index]
    others = [result for i, result in enumerate(results) if i != index]
    before = {key: sum(result[key] for result in others) for key in ("samples", "seconds")}
    reached = next((p for p in winner["curve"] if p["accuracy"] >= target), None)
    searches = [r["notes"] for r in results if r.get("notes")]
    return {
        "undecided": sum(n[-1]["reason"].startswith("not decided") for n in searches),
        "accuracy": 100 * winner["accuracy"],
        "trainings": (before["samples"] + winner["samples"]) / training,
        "seconds": before["seconds"] + winner["seconds"],
        "peak_lr": winner["peak_lr"],
        "reach": reached
        and {
            "trainings": (before["samples"] + reached["samples"]) / training,
            "seconds": before["seconds"] + reached["seconds"],
        },
    }


def over_seeds(outcomes: Sequence[Result]) -> dict[str, Any]:
    """Return a row of one task for the JSON object; `reach_*` average the seeds that got there."""
    accuracies = [o["accuracy"] for o in outcomes]
    reached = [o["reach"] for o in outcomes if o["reach"]]
    return {
        "accuracy_mean": round(mean(accuracies), 3),
        "accuracy_min": round(min(accuracies), 3),
        "accuracy_max": round(max(accuracies), 3),
        "trainings": round(mean(o["trainings"] for o in outcomes), 3),
        "wall_seconds": round(mean(o["seconds"] for o in outcomes), 2),
        "reached": len(reached),
        "reach_trainings": round(mean(r["trainings"] for r in reached), 3) if reached else None,
        "reach_seconds": round(mean(r["seconds"] for r in reached), 2) if reached else None,
        "accuracies": [round(a, 3) for a in accuracies],
        "peak_lrs": [o["peak_lr"] for o in outcomes],
        "undecided": sum(o["undecided"] for o in outcomes),
    }


Table = Mapping[str, Mapping[str, Mapping[str, Any]]]  # task, row


def summary(table: Table) -> dict[str, Any]:
    """Return ours minus others: means over the tasks that have the rows, and by task.

    Of several other rows the better one counts in each task.
    """
    minus = {
        "ours_minus_oracle_points": ("cosine_oracle", "linear_oracle"),
        "ours_minus_grid_points": ("cosine_grid", "linear_grid"),
        "ours_minus_stpt_points": ("stpt",),
        "ours_minus_cosine_default_points": ("cosine_default",),
        "ours_minus_everything_points": ("everything",),
        "ours_minus_users_points": ("users",),
        "ours_minus_schedulefree_points": ("schedulefree_default", "schedulefree_oracle"),
    }
    means: dict[str, Any] = {}
    by_task: dict[str, dict[str, float]] = {}
    for name, others in minus.items():
        differences = {
            task: by_row["ours"]["accuracy_mean"] - best
            for task, by_row in table.items()
            if "ours" in by_row and not math.isnan(best := _best(by_row, others))
        }
        means[name] = _mean(differences.values())
        by_task[name] = {task: round(value, 3) for task, value in differences.items()}
    means["ours_samples_ratio"] = _mean(
        by_row["ours"]["trainings"] for by_row in table.values() if "ours" in by_row
    )
    reach = {
        task: by_row["ours"]["reach_trainings"]
        for task, by_row in table.items()
        if "ours" in by_row and by_row["ours"]["reach_trainings"] is not None
    }
    means["reach_trainings"] = _mean(reach.values())
    by_task["reach_trainings"] = reach
    ours = [by_row["ours"] for by_row in table.values() if "ours" in by_row]
    against_best = ("ours_minus_everything_points", "ours_minus_users_points")
    points = [value for name in against_best for value in by_task[name].values()]
    means["worst_task_points"] = min(points, default=None)
    means["tasks"], means["undecided"] = len(ours), sum(row.get("undecided", 0) for row in ours)
    by_task["standard_error"] = {
        task: round(_standard_error(by_row["ours"], by_row[name]), 3)
        for task, by_row in table.items()
        for name in ("everything", "users")
        if "ours" in by_row and name in by_row and len(by_row["ours"]["accuracies"]) > 1
    }
    wrong = {task: _wrong_start(by_row) for task, by_row in table.items()}
    return {**means, "wrong_start": wrong, "by_task": by_task}


def _standard_error(row: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return the pooled standard deviation over the seeds, divided by the root of their number."""
    pooled = sqrt((variance(row["accuracies"]) + variance(other["accuracies"])) / 2)
    return pooled / sqrt(len(row["accuracies"]))


def _best(by_row: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> float:
    """Return the best mean accuracy of the rows; not a number if a row is missing."""
    if any(name not in by_row for name in names):
        return math.nan
    return max(float(by_row[name]["accuracy_mean"]) for name in names)


def _wrong_start(by_row: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    ours = _best(by_row, ("ours",))
    differences = {
        name: _best(by_row, (f"ours_start_{name}",)) - ours for name in ("too_small", "too_large")
    }
    return {name: None if math.isnan(d) else round(d, 3) for name, d in differences.items()}


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return round(mean(numbers), 3) if numbers else None
