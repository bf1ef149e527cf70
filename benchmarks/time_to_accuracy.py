"""Accuracy and the compute it took: our learning-rate search against what others do, on CPU.

    python benchmarks/time_to_accuracy.py --data-root FOLDER [--cache FILE] [--quick]
        [--tasks T ...] [--rows R ...] [--seeds 3] [--epochs 16] [--scale 1] [--ours JSON]

Tasks: subsets of real image sets, small enough for 2 cores, in `comparison_tasks.py`, which also
says what FOLDER holds. ResNet-8, momentum SGD 0.9, weight decay 5e-4, the same batch, epochs and
augmentation for all contenders of a task. Of the training images a selection split is left out
by every contender; whatever a contender chooses, it chooses by that split. The accuracy is that
on the test split after the last epoch; nobody chooses by it but the rows named `oracle`, which
say what perfect choice would give. A seed sets weights, order, augmentation and both splits of
the training images.

Rows, in `comparison_rows.py`:

ours                  the product's default policy (`--ours`: another learning_rate section); and
                      the same when told to begin at a rate 100 times too small or too large
stpt                  the published rule: policy stpt, Mix, alpha a fifth of an epoch
cosine, linear        a warm-up of a tenth of the epochs (rounded), then the decay to zero, from
                      0.1; and the best of six rates, by the test split (oracle) or by the
                      selection split (grid). All six are paid for
asha, pbt             Ray Tune's own, with the compute of the grid; see `comparison_tune.py`
schedulefree          schedulefree.SGDScheduleFree at its default rate, 1; the best of three
lr_find               Lightning's Tuner.lr_find, then cosine from its suggestion. Since 2.5.3 it
                      suggests far too little on noisy losses (its issue 21141, open); the second
                      row takes the same range test's suggestion as it was before

Ours, the published rule and the schedules run the product's own code (`driver.train`, policies,
schedules, learner, data), with only the pools replaced by one process (`in_process.py`): what a
pool does side by side is done one after the other. The others have the product's learner too.

Columns: `accuracy_*`, in percent, over the seeds. `trainings`: samples trained, every candidate's
and trial's included, divided by those of one training; samples that are only scored do not count.
`wall_seconds`: training, searching and scoring in one process of one thread, one after the other;
not counted are the start of processes (but Ray Tune's own for its trials), imports, building
the network, reading data, and looking at the test split. `reach_*`: the same up to the epoch
after which it is as good as cosine 0.1 of the same seed is at its end, on a part of the test split
of about 2,500 images that is looked at after each epoch of the second half of the training: a
noisy measure; means over the `reached` seeds. Where one of several trainings is taken, the others
come first; of a search on Ray Tune, all that ran before.

`summary`: differences in points and `ours_samples_ratio` (trainings of ours), means over the
tasks, then by task. The oracle is the better of the cosine's and the linear's.

`--cache FILE` keeps each finished training as a line; a run that was cut off goes on from there,
and `--merge FILE ...` takes the trainings of other such files too. Neither knows of changes to
the code of the benchmark or of torch. Trainings run side by side in as many processes as there
are cores; on 2 cores the whole takes less than an hour, `--quick` (1 task, 1 seed) less than 5
minutes. Measure seconds on a machine with nothing else to do. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import machine
from comparison_rows import Row, outcome, over_seeds, rows, summary
from comparison_tasks import MADE_UP, TASKS, Task
from comparison_units import Cache, Result, Setting, Unit, computed, missing

from raytrain_opt.clock import monotonic_s
from raytrain_opt.telemetry.records import finite, versions

OURS = {"policy": "stpt_horizon"}
QUICK = {"tasks": ["cifar100_coarse_16"], "seeds": 1, "epochs": 16}


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        result = compare(args, Path(folder))
    print_table(result["tasks"])
    print(json.dumps(finite(result)))


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compute what is not in the cache, and put the rows together."""
    started_s = monotonic_s()
    chosen = {name: row for name, row in rows(args.ours).items() if name in args.rows}
    baseline = rows(args.ours)["cosine_default"]
    settings = _settings(args, folder)
    kept = Cache(args.merge, args.cache)
    wanted = [
        unit
        for setting in settings
        for row in (*chosen.values(), baseline)
        for unit in row.units(setting)
    ]
    _compute(missing(wanted, kept), kept, args.processes)
    table: dict[str, dict[str, Any]] = {}
    for task in dict.fromkeys(setting.task.name for setting in settings):
        of_task = [setting for setting in settings if setting.task.name == task]
        table[task] = {
            name: over_seeds([_outcome(row, baseline, s, kept) for s in of_task])
            for name, row in chosen.items()
        }
    return {
        "tasks": table,
        "summary": summary(table),
        "seconds": round(monotonic_s() - started_s, 1),
        "setting": _described(args, settings),
        "machine": machine(),
        "versions": _versions(),
    }


def _settings(args: argparse.Namespace, folder: Path) -> list[Setting]:
    """Every task with every seed; their data are written below `folder`."""
    tasks = [task.scaled(args.scale) for task in args.tasks]
    data = {task.name: task.prepare(args.data_root, folder) for task in tasks}
    return [
        Setting(task, seed, args.epochs, data[task.name])
        for task in tasks
        for seed in range(args.seeds)
    ]


def _compute(units: Sequence[Unit], kept: Cache, processes: int) -> None:
    """Fill the cache."""
    started_s = monotonic_s()
    for done, (unit, result) in enumerate(computed(units, processes), start=1):
        kept.add(unit, result)
        setting = unit.setting
        _say(
            f"{monotonic_s() - started_s:6.0f} s  {done}/{len(units)}  {setting.task.name} "
            f"seed {setting.seed}  {unit.name}: {100 * result['accuracy']:.2f} %, "
            f"{result['samples'] / setting.training_samples:.2f} trainings, "
            f"{result['seconds']:.1f} s, peak {result['peak_lr']:.4g}"
            + (f", diverged: {result['diverged']}" if result["diverged"] else "")
        )


def _outcome(row: Row, baseline: Row, setting: Setting, kept: Cache) -> Result:
    [default] = baseline.units(setting)
    curve = kept[default]["curve"]
    # One that diverged is beaten by anybody.
    target = curve[-1]["accuracy"] if curve and not kept[default]["diverged"] else 0.0
    results = [kept[unit] for unit in row.units(setting)]
    return outcome(row, results, target, setting.training_samples)


def print_table(tasks: dict[str, dict[str, Any]]) -> None:
    """For people."""
    from rich.console import Console
    from rich.table import Table

    titles = {name: row.title for name, row in rows(OURS).items()}
    console = Console(width=None if sys.stdout.isatty() else 120)
    for task, by_row in tasks.items():
        table = Table(title=task)
        table.add_column("")
        for column in ("accuracy", "min .. max", "trainings", "s", "reached", "at", "after s"):
            table.add_column(column, justify="right")
        for name, row in by_row.items():
            table.add_row(titles[name], *_cells(row))
        console.print(table)


def _cells(row: dict[str, Any]) -> list[str]:
    reached = row["reached"]
    return [
        f"{row['accuracy_mean']:.2f}",
        f"{row['accuracy_min']:.2f} .. {row['accuracy_max']:.2f}",
        f"{row['trainings']:.2f}",
        f"{row['wall_seconds']:.0f}",
        f"{reached}/{len(row['accuracies'])}",
        f"{row['reach_trainings']:.2f}" if reached else "-",
        f"{row['reach_seconds']:.0f}" if reached else "-",
    ]


def _described(args: argparse.Namespace, settings: Sequence[Setting]) -> dict[str, Any]:
    tasks = {setting.task.name: setting.task for setting in settings}
    return {
        "tasks": {name: vars(task) for name, task in tasks.items()},
        "seeds": args.seeds,
        "epochs": args.epochs,
        "processes": args.processes,
        "ours": args.ours,
    }


def _versions() -> dict[str, Any]:
    from importlib.metadata import version

    others = {name: version(name) for name in ("lightning", "schedulefree")}
    return {**versions(), **others}


def _say(line: str) -> None:
    print(line, flush=True)


def _arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learning-rate searches against each other.")
    names = list(rows(OURS))
    parser.add_argument("--data-root", type=Path, help="folder of the image sets")
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS, MADE_UP.name])
    parser.add_argument("--rows", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", type=int, help="how many, from 0")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the images")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--ours", type=json.loads, default=OURS, help="learning_rate, as JSON")
    parser.add_argument("--cache", type=Path, help="file that keeps what was computed")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="more such files")
    parser.add_argument("--quick", action="store_true", help="one task, one seed")
    args = parser.parse_args(given)
    defaults = QUICK if args.quick else {"tasks": list(TASKS), "seeds": 3, "epochs": 16}
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    every: dict[str, Task] = {**TASKS, MADE_UP.name: MADE_UP}
    args.tasks = [every[name] for name in args.tasks]
    if args.data_root is None and args.tasks != [MADE_UP]:
        parser.error(
            "--data-root: the folder of the image sets; see the head of comparison_tasks.py for "
            "its layout"
        )
    return args


if __name__ == "__main__":
    main()
