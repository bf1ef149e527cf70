"""What the comparisons have in common on the command line: options, settings, progress."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comparison_tasks import MADE_UP, Task
from comparison_units import Cache, Setting, Unit, computed, missing

from raytrain_opt.clock import monotonic_s


def command(
    description: str, tasks: Mapping[str, Task], rows: Sequence[str]
) -> argparse.ArgumentParser:
    """With the options of every comparison; `parsed` reads them."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data-root", type=Path, help="folder of the image sets")
    parser.add_argument("--tasks", nargs="+", choices=[*tasks, MADE_UP.name])
    parser.add_argument("--rows", nargs="+", choices=rows, default=rows)
    parser.add_argument("--seeds", type=int, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--scale", type=float, help="factor of the images")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", type=Path, help="file that keeps what was computed")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="more such files")
    parser.add_argument("--quick", action="store_true", help="a smaller run")
    return parser


def parsed(
    parser: argparse.ArgumentParser,
    given: Sequence[str] | None,
    tasks: Mapping[str, Task],
    whole: Mapping[str, Any],
    quick: Mapping[str, Any],
) -> argparse.Namespace:
    """What was asked for; for what was not, the values of `whole`, or of `quick`."""
    args = parser.parse_args(given)
    for name, value in (quick if args.quick else whole).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    every = {**tasks, MADE_UP.name: MADE_UP}
    args.tasks = [every[name] for name in args.tasks]
    if args.data_root is None and args.tasks != [MADE_UP]:
        parser.error(
            "--data-root: the folder of the image sets; see the head of comparison_tasks.py for "
            "its layout"
        )
    return args


def settings_of(args: argparse.Namespace, folder: Path) -> list[Setting]:
    """Every task with every seed; their data are written below `folder`."""
    tasks = [task.scaled(args.scale) for task in args.tasks]
    data = {task.name: task.prepare(args.data_root, folder) for task in tasks}
    return [
        Setting(task, seed, args.epochs, data[task.name])
        for task in tasks
        for seed in range(args.first_seed, args.first_seed + args.seeds)
    ]


def described(args: argparse.Namespace, settings: Sequence[Setting]) -> dict[str, Any]:
    """What was compared, for the JSON."""
    tasks = {setting.task.name: setting.task for setting in settings}
    return {
        "tasks": {name: vars(task) for name, task in tasks.items()},
        "seeds": sorted({setting.seed for setting in settings}),
        "epochs": args.epochs,
        "processes": args.processes,
    }


def fill(kept: Cache, wanted: Sequence[Unit], processes: int) -> None:
    """Compute what is not kept yet, with a line of progress for each."""
    started_s, units = monotonic_s(), missing(wanted, kept)
    for done, (unit, result) in enumerate(computed(units, processes), start=1):
        kept.add(unit, result)
        setting = unit.setting
        print(
            f"{monotonic_s() - started_s:6.0f} s  {done}/{len(units)}  {setting.task.name} "
            f"seed {setting.seed}  {unit.name}: {100 * result['accuracy']:.2f} %, "
            f"{result['samples'] / setting.training_samples:.2f} trainings, "
            f"{result['seconds']:.1f} s, peak {result['peak_lr']:.4g}"
            + (f", diverged: {result['diverged']}" if result["diverged"] else ""),
            flush=True,
        )
