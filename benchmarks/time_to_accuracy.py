"""Accuracy and the compute it took: our learning-rate search against what others do, on CPU.

    python benchmarks/time_to_accuracy.py --data-root FOLDER [--cache FILE] [--quick]
        [--tasks T ...] [--rows R ...] [--seeds 3] [--epochs 16] [--scale 1] [--ours JSON]
        [--first-seed 0] [--optimizer SGD]

Tasks: subsets of real image sets, small enough for 2 cores, in `comparison_tasks.py`, which also
says what FOLDER holds. ResNet-8, momentum SGD 0.9, weight decay 5e-4 (or AdamW or LARS: then
without the rows of other packages), the same batch, epochs and augmentation for all contenders
of a task. Of the training images a selection split is left out
by every contender; whatever a contender chooses, it chooses by that split. The accuracy is that
on the test split after the last epoch; nobody chooses by it but the rows named `oracle`, which
say what perfect choice would give. A seed sets weights, order, augmentation and both splits of
the training images.

Rows, in `comparison_rows.py`:

ours                  the product's default policy (`--ours`: another learning_rate section); and
                      the same when told to begin at a rate 100 times too small or too large
stpt                  the published rule: policy stpt, Mix, alpha a fifth of an epoch
cosine, linear        a warm-up of a tenth of the epochs (rounded), then the decay to zero, from
                      the optimiser's usual rate (0.1 with SGD, 0.001 with AdamW, 1 with LARS);
                      and the best of six, a quarter to eight times that, by the test split
                      (oracle) or by the selection split (grid). All six are paid for. Ours is
                      not told the usual rate: it begins at 0.1 with any optimiser
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
after which it is as good as the cosine from the usual rate, with the same seed, is at its end, on
a part of the test split of about 2,500 images that is looked at after each epoch of the second
half of the training: a noisy measure; means over the `reached` seeds. Where one of several
trainings is taken, the others come first; of a search on Ray Tune, all that ran before.

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
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import machine
from comparison_command import command, described, fill, parsed, settings_of
from comparison_rows import Row, outcome, over_seeds, rows, summary, target_of
from comparison_tasks import OPTIMIZERS, TASKS
from comparison_units import Cache, Result, Setting

from raytrain_opt.clock import monotonic_s
from raytrain_opt.telemetry.records import finite, versions

OURS = {"policy": "stpt_horizon"}
WHOLE = {"tasks": list(TASKS), "seeds": 3, "epochs": 16, "scale": 1.0}
QUICK = {"tasks": ["cifar100_coarse_16"], "seeds": 1, "epochs": 16, "scale": 1.0}


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
    settings = [replace(s, optimizer=args.optimizer) for s in settings_of(args, folder)]
    kept = Cache(args.merge, args.cache)
    wanted = [
        unit
        for setting in settings
        for row in (*chosen.values(), baseline)
        for unit in row.units(setting)
    ]
    fill(kept, wanted, args.processes)
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
        "setting": {
            **described(args, settings),
            "ours": args.ours,
            "optimizer": args.optimizer,
        },
        "machine": machine(),
        "versions": _versions(),
    }


def _outcome(row: Row, baseline: Row, setting: Setting, kept: Cache) -> Result:
    [default] = baseline.units(setting)
    results = [kept[unit] for unit in row.units(setting)]
    return outcome(row, results, target_of(kept[default]), setting.training_samples)


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


def _versions() -> dict[str, Any]:
    from importlib.metadata import version

    others = {name: version(name) for name in ("lightning", "schedulefree")}
    return {**versions(), **others}


def _arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command("Learning-rate searches against each other.", TASKS, list(rows(OURS)))
    parser.add_argument("--ours", type=json.loads, default=OURS, help="learning_rate, as JSON")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="SGD")
    parser.set_defaults(rows=None)
    args = parsed(parser, given, TASKS, WHOLE, QUICK)
    every = rows(args.ours)
    possible = [name for name in every if args.optimizer == "SGD" or not every[name].only_sgd]
    args.rows = args.rows or possible
    if impossible := sorted({*args.rows}.difference(possible)):
        parser.error(f"--rows: only with SGD: {', '.join(impossible)}")
    return args


if __name__ == "__main__":
    main()
