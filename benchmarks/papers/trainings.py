"""Trainings of the published jobs at the size of a small machine, each computed once.

A `Training` is a file of jobs/ with the overrides that scale it down. It runs in one process of
one thread without Ray (in_process.py): a job with several workers computes their micro-batches one
after another, so BatchNorm sees the batch of one worker, as in the published settings.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image

from benchmarks.common import JOBS, finite, machine
from benchmarks.comparison_tasks import Task
from benchmarks.comparison_units import Cache, Result
from benchmarks.in_process import train_in_process
from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.load import load_job
from raytrain_opt.config.schema import Job
from raytrain_opt.execution.resolve import Placement, settle
from raytrain_opt.recording.recorder import versions
from raytrain_opt.report.plots import save_figure


@dataclass(frozen=True)
class Training:
    """One training of the row `row`: `file` of jobs/ with `overrides`, on the images of `task`.

    `batch`: samples per update; `per_worker`: at most this many of them in one micro-batch.
    """

    row: str
    file: str
    task: Task
    batch: int
    epochs: int
    seed: int
    overrides: tuple[str, ...] = ()
    per_worker: int = 128

    def job(self, data: Mapping[str, Any]) -> Job:
        """Return the job with `data` as its data section."""
        workers = {"count": max(1, self.batch // self.per_worker), "threads": 1}
        model = {"name": self.task.network, "args": {"width": self.task.width}}
        if not self.task.validation:
            data = {**data, "validation_fraction": 0}
        sections = {"model": model, "data": data, "workers": workers, "parallel": {}}
        scale = (
            *(f"{name}={json.dumps(value)}" for name, value in sections.items()),
            f"epochs={self.epochs}",
            f"global_batch_size={self.batch}",
            f"seed={self.seed}",
            "precision=fp32",
            "average=null",
            "batch_size_search=null",
            "evaluate.every_epochs=1",
        )
        job = load_job(JOBS / self.file, [*scale, *self.overrides])
        return settle(job, Placement.from_job(job), job.global_batch_size)

    @property
    def key(self) -> str:
        """A digest of everything the result depends on, except versions and machine."""
        written = self.job({"name": "digits"}).model_dump(mode="json", exclude_unset=True)
        inputs = {"task": asdict(self.task), "job": written}
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def about(self) -> dict[str, Any]:
        """What a line of the cache says for people."""
        return {"row": self.row, "batch": self.batch, "seed": self.seed}


def train_missing(trainings: Iterable[Training], cache: Cache, root: Path, folder: Path) -> None:
    """Train what is not in the cache, one after another, printing a line for each."""
    torch.set_num_threads(1)
    for training in trainings:
        if training in cache:
            continue
        began_s = monotonic_s()
        data = training.task.prepare(root, folder)
        result = train_in_process(training.job(data), on_training_images=True).to_json()
        cache.add(training, result)
        print(
            f"{training.row}, batch {training.batch}, seed {training.seed}: "
            f"{100 * result['accuracy']:.2f} %, {monotonic_s() - began_s:.0f} s "
            f"{result['diverged']}",
            flush=True,
        )


def accuracies(trainings: Sequence[Training], cache: Cache) -> dict[str, Any]:
    """Return mean, lowest and highest test accuracy in percent, over the seeds in the cache.

    `values`: of each seed. `trainings`: samples trained, with every candidate's, divided by those
    behind the final weights. `gap`: accuracy on the training images minus that on the test images,
    the mean. `noise_scale`: the highest rate times training images, divided by the samples of an
    update (Smith and Le, without momentum). `seconds`: of training on one thread, the median.
    """
    results: list[Result] = [cache[training] for training in trainings if training in cache]
    if not results:
        return {"seeds": 0}
    values = [100 * result["accuracy"] for result in results]
    gaps = [100 * (result["train_accuracy"] - result["accuracy"]) for result in results]
    peak_lr, first = results[0]["peak_lr"], trainings[0]
    return {
        "seeds": len(values),
        **low_mean_high(values),
        "values": [round(value, 2) for value in values],
        "trainings": round(
            mean(r["samples"] / (r["samples"] - r["search_samples"]) for r in results), 2
        ),
        "gap": round(mean(gaps), 2),
        "peak_lr": round(peak_lr, 4),
        "noise_scale": round(peak_lr * first.task.train / first.batch, 2),
        "seconds": round(median(result["seconds"] for result in results), 1),
        "diverged": sum(bool(result["diverged"]) for result in results),
    }


def low_mean_high(values: Sequence[float]) -> dict[str, float]:
    """Return mean, lowest and highest value."""
    return {
        "mean": round(mean(values), 2),
        "min": round(min(values), 2),
        "max": round(max(values), 2),
    }


def run_paper(
    description: str,
    plan: Callable[[argparse.Namespace], list[Training]],
    paint: Callable[[Any, Cache], None],
    paper: Mapping[str, str],
) -> None:
    """Parse the command line, train what is missing, print the rows and one JSON object.

    paper: what the paper has for a row; most rows are not in it.
    """
    args = _arguments(description)
    cache, planned = Cache(args.merge, args.cache), list(dict.fromkeys(plan(args)))
    if not args.cached:
        with TemporaryDirectory() as folder:
            train_missing(planned, cache, args.data_root, Path(folder))
    groups: dict[tuple[str, int], list[Training]] = {}
    for training in planned:
        groups.setdefault((training.row, training.batch), []).append(training)
    rows = [
        {"row": row, "batch": batch, "paper": paper.get(row), **accuracies(of_row, cache)}
        for (row, batch), of_row in groups.items()
    ]
    print(
        "row              batch  test accuracy, % (seeds)  train - test  rate  noise scale  "
        "seconds  paper"
    )
    for row in rows:
        if row["seeds"]:
            print(
                f"{row['row']:16} {row['batch']:5}  {row['mean']:5.2f} "
                f"({row['min']:5.2f} to {row['max']:5.2f}, {row['seeds']})  {row['gap']:8.2f}    "
                f"{row['peak_lr']:7g}  {row['noise_scale']:7g}  {row['seconds']:7g}    "
                f"{row['paper'] or '-'}"
                + (f"  {row['diverged']} diverged" if row["diverged"] else "")
            )
    write_plot(args.plot, lambda axes: paint(axes, cache))
    print(json.dumps(finite({"rows": rows, "machine": machine(), "versions": versions()})))


def write_plot(file: Path | None, paint: Callable[[Any], None]) -> None:
    """Write a figure as PNG if a file is given: with few colors, for the repository."""
    if file is not None:
        png = io.BytesIO()
        save_figure(png, file.stem, paint, format="png", dpi=200, facecolor="white")
        image = Image.open(png)
        image.convert("RGB").quantize(64).save(file, "PNG", optimize=True)


def paint_lines(
    axes: Any, curves: Mapping[str, Mapping[int, Mapping[str, Any]]], x: str, y: str
) -> None:
    """Draw a line of means, with a bar from lowest to highest, for each row that has values."""
    for name, values in curves.items():
        known = {key: value for key, value in values.items() if value["seeds"]}
        means = [value["mean"] for value in known.values()]
        below = [value["mean"] - value["min"] for value in known.values()]
        above = [value["max"] - value["mean"] for value in known.values()]
        if known:
            axes.errorbar(list(known), means, (below, above), marker="o", label=name)
    axes.set_xscale("log", base=2)
    ticks = sorted({key for values in curves.values() for key in values})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def paper_parser(
    description: str | None, full: str, *, required: bool = True
) -> argparse.ArgumentParser:
    """Return a parser with `--quick`, `--full`, which takes as long as `full` says, and files.

    required: whether `--data-root` is.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--quick", action="store_true", help="minutes on a CPU")
    size.add_argument("--full", action="store_true", help=full)
    parser.add_argument(
        "--data-root", type=Path, required=required, help="folder of the image sets"
    )
    parser.add_argument("--plot", type=Path, help="write a figure, a PNG file")
    return parser


def _arguments(description: str) -> argparse.Namespace:
    parser = paper_parser(description, "hours on a CPU", required=False)
    parser.add_argument("--seeds", type=int, help="default: 1 with --quick, else 3")
    parser.add_argument("--cache", type=Path, help="file that keeps every training")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="more such files")
    parser.add_argument("--cached", action="store_true", help="show the cache, train nothing")
    args = parser.parse_args()
    args.seeds = args.seeds or (1 if args.quick else 3)
    if args.data_root is None and not args.cached:
        parser.error("--data-root is required unless --cached is given")
    return args
