"""Accuracy and compute of the product's learning-rate search against the alternatives, on CPU.

    python -m benchmarks.time_to_accuracy --data-root FOLDER [--cache FILE] [--quick]
        [--tasks T ...] [--rows R ...] [--seeds 3] [--epochs 16] [--scale 1] [--ours JSON]
        [--first-seed 0] [--batch-factor 1] [--optimizer auto]

Tasks: subsets of real image sets, small enough for 2 cores (comparison_tasks.py, which also
describes FOLDER). By default five with a ResNet-8; `--tasks` also names other networks (such as an
MLP, a VGG without BatchNorm, a vision transformer, a ConvNeXt, a GRU) and other data (labels of
which 40 % are wrong, few images, rotations, text), and what people bring
in four lengths each (comparison_kinds.py: texts, a table, segmentation, fine-tuning, ...), and
`cifar100_whole` and `fashion_mnist_whole`, which take hours without a GPU. The same batch, epochs
and augmentation for all contenders of a task.
With `--optimizer auto`, the default, ours chooses the optimizer and the other rows train with
momentum SGD 0.9, weight decay 5e-4, unless they are named after another; with an optimizer named,
all rows train with that one. Fixed schedules train on all training images. What chooses by a
validation split holds it out: ours during its search, the rows named `grid` and STPT during the
training. The accuracy is that on the test split after the last epoch; only the rows
named `oracle`, and `everything`, choose by it, to show the result of a perfect choice. A seed sets
weights, order, augmentation and the split of the training images.

Rows (comparison_rows.py):

ours                  the product's default policy (`--ours`: another learning_rate section); and
                      the same started at a rate 100 times too small or too large
stpt                  STPT as published: policy stpt, Mix, alpha 8 % of an epoch, a tenth of the
                      epochs of constant warm-up at 0.005, then from 0.1
cosine, linear        a warm-up of a tenth of the epochs (rounded), then the decay to zero from
                      the optimizer's customary rate (0.1 with SGD, 0.001 with AdamW, 1 with
                      LARS); and the best of six rates, a quarter to eight times that, by the
                      test split (oracle) or by the validation split (grid). All six count as
                      cost. Ours does not know the customary rate: it starts at 0.1 with any
                      optimizer
muon_oracle           Muon at four rates, linear decay, the best by the test split
adamw_oracle          AdamW at six rates, linear decay, the best by the test split
users                 the best by the test split of what people take: AdamW at four rates, SGD at
                      four, Muon at three, cosine with a warm-up; schedule-free AdamW at two
everything            the best by the test split of all trainings of fixed schedules in this table,
                      with any optimizer and rate, schedule-free ones included
schedulefree          schedule-free SGD at its default rate, 1, and the best of three;
                      schedule-free AdamW at 0.0025, and the best of two

All rows run the product's own code (`driver.train`, policies, schedules, learner, data) **in one
process without Ray** (in_process.py), one candidate after another instead of side by side.

Columns: `accuracy_*`, in percent, over the seeds. `trainings`: samples trained, including every
candidate's, divided by those of one training; samples that are only scored do not count.
`wall_seconds`: training, searching and scoring in one process of one thread, one after another,
without the start of processes, imports, building the network, reading data, and evaluating on the
test split. `reach_*`: the same until the first epoch that is as good as the final one of the
cosine from the customary rate with the same seed, on a part of the test split of about 2,500
images that is evaluated after each epoch: a noisy measure; means over the `reached` seeds. Where
one of several trainings is chosen, the others are counted first.

`summary`: differences in points and `ours_samples_ratio` (trainings of ours), means over the
tasks, then by task. The oracle is the better of the cosine's and the linear's.
`worst_task_points`: the lowest difference from `everything` or `users`; `tasks`: how many have
ours; `undecided`: searches of ours that decided nothing; `standard_error`, by task: the pooled
standard deviation over the seeds, divided by the root of their number. A difference below two of
them is noise.

`--cache FILE` keeps each finished training as a line, so an interrupted comparison continues;
`--merge FILE ...` reads the trainings of other such files too. Neither notices changes to the code
of the benchmark or of torch, or another machine: compare only rows of one machine. Trainings run
in parallel in as many processes as there are cores; on 2 cores everything takes less than an
hour, `--quick` (1 task, 1 seed) less than 5 minutes. Measure seconds on a machine with nothing
else to do. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import finite, machine
from benchmarks.comparison_kinds import KINDS
from benchmarks.comparison_rows import Row, outcome, over_seeds, rows, summary, target_of
from benchmarks.comparison_tasks import (
    OPTIMIZERS,
    OTHER_DATA,
    OTHER_NETWORKS,
    SYNTHETIC,
    TASKS,
    WHOLE,
)
from benchmarks.comparison_units import Cache, Result, Setting, Unit, compute_all, missing
from raytrain_opt.clock import monotonic_s
from raytrain_opt.recording.recorder import versions

ALL_TASKS = {**TASKS, **OTHER_NETWORKS, **OTHER_DATA, **KINDS, **WHOLE, SYNTHETIC.name: SYNTHETIC}
OURS = {"policy": "stpt_horizon"}


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        result = compare(args, Path(folder))
    print(json.dumps(finite(result)))


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compute what is not in the cache and assemble the rows."""
    started_s = monotonic_s()
    chosen = {name: row for name, row in rows(args.ours).items() if name in args.rows}
    baseline = rows(args.ours)["cosine_default"]
    settings = _settings(args, folder)
    cache = Cache(args.merge, args.cache)
    units = [
        unit
        for setting in settings
        for units in (*(row.units(setting) for row in chosen.values()), baseline.units(setting))
        for unit in units
    ]
    compute_missing(cache, units, args.processes)
    table: dict[str, dict[str, Any]] = {}
    for task in dict.fromkeys(setting.task.name for setting in settings):
        task_settings = [setting for setting in settings if setting.task.name == task]
        table[task] = {
            name: over_seeds([_outcome(row, baseline, s, cache) for s in task_settings])
            for name, row in chosen.items()
        }
    return {
        "tasks": table,
        "summary": summary(table),
        "seconds": round(monotonic_s() - started_s, 1),
        "setting": {
            "tasks": {setting.task.name: vars(setting.task) for setting in settings},
            "seeds": sorted({setting.seed for setting in settings}),
            "epochs": args.epochs,
            "processes": args.processes,
            "ours": args.ours,
            "optimizer": args.optimizer,
        },
        "machine": machine(),
        "versions": versions(),
    }


def _settings(args: argparse.Namespace, folder: Path) -> list[Setting]:
    """Return every task with every seed; write the tasks' data below `folder`."""
    tasks = [ALL_TASKS[name].scaled(args.scale, args.batch_factor) for name in args.tasks]
    data = {task.name: task.prepare(args.data_root, folder) for task in tasks}
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    return [
        Setting(task, seed, task.epochs or args.epochs, data[task.name], args.optimizer)
        for task in tasks
        for seed in seeds
    ]


def compute_missing(cache: Cache, units: Sequence[Unit], processes: int) -> None:
    """Compute the units that are not in the cache, printing a line for each."""
    started_s, todo = monotonic_s(), missing(units, cache)
    for done, (unit, result) in enumerate(compute_all(todo, processes), start=1):
        cache.add(unit, result)
        setting = unit.setting
        print(
            f"{monotonic_s() - started_s:6.0f} s  {done}/{len(todo)}  {setting.task.name} "
            f"seed {setting.seed}  {unit.name}: {100 * result['accuracy']:.2f} %, "
            f"{result['samples'] / setting.training_samples:.2f} trainings, "
            f"{result['seconds']:.1f} s, peak {result['peak_lr']:.4g}"
            + (f", diverged: {result['diverged']}" if result["diverged"] else ""),
            flush=True,
        )


def _outcome(row: Row, baseline: Row, setting: Setting, cache: Cache) -> Result:
    [default] = baseline.units(setting)
    results = [cache[unit] for unit in row.units(setting)]
    return outcome(row, results, target_of(cache[default]), setting.training_samples)


def _arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learning-rate searches against each other.")
    parser.add_argument("--data-root", type=Path, help="folder of the image sets")
    parser.add_argument("--tasks", nargs="+", choices=ALL_TASKS)
    parser.add_argument("--rows", nargs="+", choices=rows(OURS))
    parser.add_argument("--seeds", type=int, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the number of images")
    parser.add_argument("--batch-factor", type=int, default=1, help="factor of the batch size")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", type=Path, help="file that keeps every result")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="more, read only")
    parser.add_argument("--quick", action="store_true", help="one task and seed by default")
    parser.add_argument("--ours", type=json.loads, default=OURS, help="learning_rate, as JSON")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="auto")
    args = parser.parse_args(argv)
    args.tasks = args.tasks or (["cifar100_coarse_16"] if args.quick else list(TASKS))
    args.seeds = args.seeds or (1 if args.quick else 3)
    if args.data_root is None and args.tasks != [SYNTHETIC.name]:
        parser.error(
            "--data-root is required: the folder of the image sets (layout: the docstring of "
            "benchmarks/comparison_tasks.py)"
        )
    possible = [
        name
        for name, row in rows(args.ours).items()
        if args.optimizer in ("auto", "SGD") or not row.only_sgd
    ]
    args.rows = args.rows or possible
    if impossible := sorted({*args.rows}.difference(possible)):
        parser.error(f"--rows: only with SGD: {', '.join(impossible)}")
    return args


if __name__ == "__main__":
    main()
