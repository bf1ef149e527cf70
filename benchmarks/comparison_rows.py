"""The rows of the comparison: which trainings each is made of, and what it says of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from comparison_units import Result, Setting, Unit

# Times the optimiser's usual rate, which is in the grid: its training is one of the grid's.
GRID = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
# Ours is not told the optimiser's usual rate.
DEFAULT_LR = 0.1
SCHEDULEFREE_DEFAULT_LR = 1.0
# Lower ones lose by points here.
SCHEDULEFREE_LRS = (SCHEDULEFREE_DEFAULT_LR, 3.0, 10.0)
WARMUP = 0.1
WRONG_BY = 100.0

Units = Callable[[Setting], list[Unit]]
# Of the outcomes of a row's units, and which of them counts.
Choice = Callable[[Sequence[Result]], int]


@dataclass(frozen=True)
class Row:
    """`choice`: by what one of several trainings is taken; all of them are paid for.
    `only_sgd`: of other packages, which the benchmark sets up for SGD.
    """

    title: str
    units: Units
    choice: Choice = lambda _: 0
    only_sgd: bool = False


def by_test(results: Sequence[Result]) -> int:
    """An oracle's choice: nobody who trains has the test split."""
    return max(range(len(results)), key=lambda i: results[i]["accuracy"])


def by_selection(results: Sequence[Result]) -> int:
    """The choice that anybody can make."""
    return max(range(len(results)), key=lambda i: results[i]["selection_accuracy"])


def rows(ours: Mapping[str, Any]) -> dict[str, Row]:
    """All rows by name; `ours`: the learning_rate section of the contender."""
    cosine, linear = _grid("cosine"), _grid("linear")
    low, high = DEFAULT_LR / WRONG_BY, DEFAULT_LR * WRONG_BY
    return {
        "ours": Row("ours", lambda s: [_ours(s, ours)]),
        "stpt": Row("STPT as published, Mix", lambda s: [_stpt(s)]),
        "cosine_default": Row("cosine, usual rate", lambda s: [_schedule(s, "cosine", 1.0)]),
        "linear_default": Row("linear, usual rate", lambda s: [_schedule(s, "linear", 1.0)]),
        "cosine_oracle": Row("cosine, best of 6 on test", cosine, by_test),
        "linear_oracle": Row("linear, best of 6 on test", linear, by_test),
        "cosine_grid": Row("cosine, best of 6 on selection", cosine, by_selection),
        "linear_grid": Row("linear, best of 6 on selection", linear, by_selection),
        "asha": Row("Ray Tune ASHA", lambda s: [_tune(s, "asha")], only_sgd=True),
        "pbt": Row("Ray Tune PBT", lambda s: [_tune(s, "pbt")], only_sgd=True),
        "schedulefree_default": Row(
            "schedule-free SGD 1.0",
            lambda s: [_schedulefree(s, SCHEDULEFREE_DEFAULT_LR)],
            only_sgd=True,
        ),
        "schedulefree_oracle": Row(
            "schedule-free SGD, best of 3 on test",
            lambda s: [_schedulefree(s, lr) for lr in SCHEDULEFREE_LRS],
            by_test,
            only_sgd=True,
        ),
        "lr_find": Row(
            "Lightning's lr_find, then cosine",
            lambda s: [_lr_find(s, "lightning")],
            only_sgd=True,
        ),
        "lr_find_by_step": Row(
            "the same, suggestion as before 2.5.3",
            lambda s: [_lr_find(s, "step")],
            only_sgd=True,
        ),
        "ours_start_too_small": Row(
            "ours, start 100 x too small", lambda s: [_ours(s, {**ours, "initial": low})]
        ),
        "ours_start_too_large": Row(
            "ours, start 100 x too large", lambda s: [_ours(s, {**ours, "initial": high})]
        ),
    }


def _ours(setting: Setting, section: Mapping[str, Any]) -> Unit:
    start = f" from {section['initial']:g}" if "initial" in section else ""
    return Unit(f"ours{start}", "train", setting, section)


def _stpt(setting: Setting) -> Unit:
    # A fifth of an epoch: epochs are so short here that the paper's 8 % would be 2 iterations.
    return Unit("stpt", "train", setting, {"policy": "stpt", "alpha": 0.2})


def _section(setting: Setting, shape: str, lr: float) -> dict[str, Any]:
    warmup = {"epochs": round(WARMUP * setting.epochs)}
    return {"policy": "schedule", "shape": shape, "initial": lr, "warmup": warmup}


def _schedule(setting: Setting, shape: str, times: float) -> Unit:
    lr = round(times * setting.usual_lr, 6)
    return Unit(f"{shape} {lr:g}", "train", setting, _section(setting, shape, lr))


def _grid(shape: str) -> Units:
    return lambda setting: [_schedule(setting, shape, times) for times in GRID]


def _tune(setting: Setting, name: str) -> Unit:
    section = _section(setting, "cosine", DEFAULT_LR)
    return Unit(name, name, setting, section, {"trainings": len(GRID)})


def _schedulefree(setting: Setting, lr: float) -> Unit:
    section = _section(setting, "constant", lr)
    return Unit(f"schedulefree {lr:g}", "schedulefree", setting, section)


def _lr_find(setting: Setting, by: str) -> Unit:
    section = _section(setting, "cosine", DEFAULT_LR)
    return Unit(f"lr_find by {by}", "lr_find", setting, section, {"by": by})


def target_of(result: Result) -> float:
    """The accuracy to reach: where this training ends, as measured after an epoch."""
    curve = result["curve"]
    # One that diverged is beaten by anybody.
    return curve[-1]["accuracy"] if curve and not result["diverged"] else 0.0


def outcome(row: Row, results: Sequence[Result], target: float, training: int) -> Result:
    """A row for one seed. `target`: accuracy to reach, `training`: samples of one training."""
    chosen = row.choice(results)
    taken = results[chosen]
    others = [result for i, result in enumerate(results) if i != chosen]
    before = {key: sum(result[key] for result in others) for key in ("samples", "seconds")}
    reached = next((p for p in taken["curve"] if p["accuracy"] >= target), None)
    return {
        "accuracy": 100 * taken["accuracy"],
        "trainings": (before["samples"] + taken["samples"]) / training,
        "seconds": before["seconds"] + taken["seconds"],
        "peak_lr": taken["peak_lr"],
        "reach": reached
        and {
            "trainings": (before["samples"] + reached["samples"]) / training,
            "seconds": before["seconds"] + reached["seconds"],
        },
    }


def over_seeds(outcomes: Sequence[Result]) -> dict[str, Any]:
    """A row of one task, for the JSON. Reaching: means over the seeds that reached it."""
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
    }


Table = Mapping[str, Mapping[str, Mapping[str, Any]]]  # task, row


def summary(table: Table) -> dict[str, Any]:
    """Ours against others: means over the tasks that have the rows, and each task's difference.
    Of several other rows the better one counts, in each task.
    """
    minus = {
        "ours_minus_oracle_points": ("cosine_oracle", "linear_oracle"),
        "ours_minus_grid_points": ("cosine_grid", "linear_grid"),
        "ours_minus_stpt_points": ("stpt",),
        "ours_minus_cosine_default_points": ("cosine_default",),
        "ours_minus_asha_points": ("asha",),
        "ours_minus_pbt_points": ("pbt",),
        "ours_minus_schedulefree_points": ("schedulefree_default", "schedulefree_oracle"),
        "ours_minus_lr_find_points": ("lr_find", "lr_find_by_step"),
    }
    found: dict[str, Any] = {}
    by_task: dict[str, dict[str, float]] = {}
    for name, others in minus.items():
        of_tasks = {
            task: by_row["ours"]["accuracy_mean"] - best
            for task, by_row in table.items()
            if "ours" in by_row and not math.isnan(best := _best(by_row, others))
        }
        found[name] = _mean(of_tasks.values())
        by_task[name] = {task: round(value, 3) for task, value in of_tasks.items()}
    found["ours_samples_ratio"] = _mean(
        by_row["ours"]["trainings"] for by_row in table.values() if "ours" in by_row
    )
    wrong = {task: _wrong_start(by_row) for task, by_row in table.items()}
    return {**found, "wrong_start": wrong, "by_task": by_task}


def _best(by_row: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> float:
    """The better of the rows; not a number when one is missing."""
    if any(name not in by_row for name in names):
        return math.nan
    return max(float(by_row[name]["accuracy_mean"]) for name in names)


def _wrong_start(by_row: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    right = _best(by_row, ("ours",))
    differences = {
        name: _best(by_row, (f"ours_start_{name}",)) - right for name in ("too_small", "too_large")
    }
    return {name: None if math.isnan(d) else round(d, 3) for name, d in differences.items()}


def _mean(values: Any) -> float | None:
    listed = list(values)
    return round(mean(listed), 3) if listed else None
