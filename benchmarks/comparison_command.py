"""Shared by the comparisons' command lines: options, settings, progress."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import finite
from benchmarks.comparison_tasks import SYNTHETIC, Task
from benchmarks.comparison_units import Cache, Setting, Unit, compute_all, missing
from raytrain_opt.clock import monotonic_s


def command(
    description: str,
    tasks: Mapping[str, Task],
    rows: Sequence[str],
    *,
    size_required: bool = False,
) -> argparse.ArgumentParser:
    """Return a parser with the options of every comparison; `parse` reads them.

    size_required: one of `--quick` and `--full` has to be given.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data-root", type=Path, help="folder of the image sets")
    parser.add_argument("--tasks", nargs="+", choices=[*tasks, SYNTHETIC.name])
    parser.add_argument("--rows", nargs="+", choices=rows, default=rows)
    parser.add_argument("--seeds", type=int, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--scale", type=float, help="factor of the number of images")
    parser.add_argument("--batch-factor", type=int, default=1, help="factor of the batch size")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", type=Path, help="file that keeps every result")
    parser.add_argument(
        "--merge", type=Path, nargs="+", default=[], help="more such files, read only"
    )
    size = parser.add_mutually_exclusive_group(required=size_required)
    size.add_argument("--quick", action="store_true", help="a smaller run")
    size.add_argument("--full", action="store_true", help="the complete run")
    return parser


def parse(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    tasks: Mapping[str, Task],
    full: Mapping[str, Any],
    quick: Mapping[str, Any],
) -> argparse.Namespace:
    """Parse `argv`, with the values of `full` (or `quick`) for options that are not given."""
    args = parser.parse_args(argv)
    for name, value in (quick if args.quick else full).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    all_tasks = {**tasks, SYNTHETIC.name: SYNTHETIC}
    args.tasks = [all_tasks[name] for name in args.tasks]
    if args.data_root is None and args.tasks != [SYNTHETIC]:
        parser.error(
            "--data-root is required: the folder of the image sets (layout: the docstring of "
            "benchmarks/comparison_tasks.py)"
        )
    return args


def prepare_settings(args: argparse.Namespace, folder: Path) -> list[Setting]:
    """Return every task with every seed; write the tasks' data below `folder`."""
    tasks = [task.scaled(args.scale, args.batch_factor) for task in args.tasks]
    data = {task.name: task.prepare(args.data_root, folder) for task in tasks}
    return [
        Setting(task, seed, task.epochs or args.epochs, data[task.name])
        for task in tasks
        for seed in range(args.first_seed, args.first_seed + args.seeds)
    ]


def setting_record(args: argparse.Namespace, settings: Sequence[Setting]) -> dict[str, Any]:
    """Return tasks, seeds and epochs for the JSON object."""
    tasks = {setting.task.name: setting.task for setting in settings}
    return {
        "tasks": {name: vars(task) for name, task in tasks.items()},
        "seeds": sorted({setting.seed for setting in settings}),
        "epochs": args.epochs,
        "processes": args.processes,
    }


def run_comparison(
    args: argparse.Namespace,
    compare: Callable[[argparse.Namespace, Path], dict[str, Any]],
    print_tables: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Compare with data in a temporary folder; print tables, and one JSON object last."""
    with tempfile.TemporaryDirectory() as folder:
        result = compare(args, Path(folder))
    print_tables(result["tasks"])
    print(json.dumps(finite(result)))
    return result


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
