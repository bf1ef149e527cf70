"""Serizawa and Tatebe: the mini-batch size for speed. What a CPU can show of it.

    python -m benchmarks.papers.mbso (--quick | --full) --data-root FOLDER [--repeats N]
        [--parts sweep search idle] [--max-loops N] [--plot FILE]

The jobs are jobs/cifar100_vgg16_mbso.yaml (its VGG16 has one BatchNorm; 32x32 images, FOLDER: see
comparison_tasks.py) and jobs/imagenet_resnet50_mbso.yaml, with one thread in place of a GPU, on
the product's learner and probes. `cifar_resnet45` has 45 convolutions in 15 blocks (50 with stem
and projections), and here a quarter of its width. ImageNet's files are Imagenette's, resized to
500x375 pixels and encoded anew, at about ImageNet's size; the network on them is a ResNet-8 on
patches. Utilization is the CPU time of the process divided by the wall time of its thread.

sweep       milliseconds per image at batches of 10 to 500 in steps of 10, the preliminary
            experiment, and the utilization. Of 96 to 106, between which the paper's epoch time
            jumps unexplained (from 47.13 to 69.17 % less than at 32 images), every even size
search      tables 3 to 7: `gpu_usage_maximize` by that utilization and `epoch_time_minimize`,
            from the paper's first sizes, of at most `--max-loops` loops: loops, size, utilization
            at the first and the last size, how much less time an image takes at the last size.
            Patterns on ImageNet with `epoch_time_minimize` only, with the small network
idle        one iteration at the batch of 96, split into waiting for data, copying, forward,
            backward, update: CIFAR-100 with its VGG16; ImageNet's files read in the process itself
            as published, from a fast disk and from one that takes 10 ms per file; and with two
            loader processes, the product's default. The paper's GPU idled about 1 s per iteration

`--quick`: sizes of 10 to 100, one pass, 8 loops, 5 minutes; `--full`: all sizes, three passes and
repetitions, 100 loops, 2 hours (one pass and repetition: 40 minutes). Medians (lowest to highest).
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image

from benchmarks.common import JOBS, finite, machine
from benchmarks.comparison_tasks import Task
from benchmarks.in_process import open_learner
from benchmarks.papers.trainings import paper_parser, write_plot
from raytrain_opt.config.load import load_job
from raytrain_opt.config.schema import Job
from raytrain_opt.data.image_folder import ImageFolderSource
from raytrain_opt.recording.recorder import versions
from raytrain_opt.results import Probe
from raytrain_opt.search.batch_size.strategy import BatchSizeChoice, SizeBounds
from raytrain_opt.search.factory import build_strategy
from raytrain_opt.train.batch_size_probe import measure, open_probe_sampler, probed_training

CIFAR, IMAGENET = "cifar100_vgg16_mbso.yaml", "imagenet_resnet50_mbso.yaml"
RESNET = 'model={"name": "cifar_resnet45", "args": {"width": 16}}'
PATCHES = "model=" + json.dumps(
    {"name": "benchmarks.comparison_tasks:resnet8_of_patches", "args": {"width": 8, "patch": 8}}
)
# Of both jobs: one thread in place of a GPU, and samples of its utilization in a short probe.
ONE_THREAD = ("workers={count: 1, threads: 1}", "batch_size_search.utilization_period_s=0.2")
_NO_VALIDATION = {"validation_fraction": 0}
TASK = Task("cifar100_fine_32", "cifar100_fine", 32, 8192, 0)
QUICK_SIZES, SIZES, JUMP_SIZES = (10, 20, 50, 100), range(10, 501, 10), range(96, 107, 2)
JPEG_BATCH, JPEG_FILES, SLOW_FILE_S = 96, 400, 0.01


@dataclass(frozen=True)
class Pattern:
    """A row of the paper's table 1: its figures, and the job that stands for it here.

    `usage`: loops, first and last size, first and last utilization (tables 3, 4). `epoch_time`:
    loops, first and last size, percent of an epoch's time saved (tables 5, 6).
    """

    title: str
    file: str
    overrides: tuple[str, ...]
    usage: tuple[float, ...]
    epoch_time: tuple[float, ...]


PATTERNS = (
    Pattern("CIFAR-100, VGG16", CIFAR, (), (10, 32, 54, 73.0, 98.23), (20, 32, 196, 73.40)),
    Pattern(
        "CIFAR-100, ResNet", CIFAR, (RESNET,), (15, 32, 70, 55.71, 98.35), (20, 32, 196, 60.31)
    ),
    Pattern(
        "ImageNet, VGG16", IMAGENET, (PATCHES,), (10, 32, 46, 90.96, 98.26), (10, 8, 72, 13.5)
    ),
    Pattern(
        "ImageNet, ResNet", IMAGENET, (PATCHES,), (20, 32, 116, 63.08, 97.61), (10, 32, 96, 8.48)
    ),
)
# What the paper has instead of figures of its own.
PAPER = {
    "sweep": "the time falls up to about 100 images, utilization rises up to about 200 (figures "
    "1, 2); an epoch takes 47.13 % less at 96 than at 32, 69.17 % less at 106 (figure 9)",
    "search": "in each row",
    "idle": "hardly any with CIFAR-100, about 1 s per iteration with ImageNet (figures 12, 13)",
}


class Probed:
    """A job on a learner of one thread, whose batch size is searched."""

    def __init__(self, pattern: Pattern, data: Mapping[str, Any], *overrides: str) -> None:
        """`data`: fields in place of those of the job's data section, or another section."""
        file = JOBS / pattern.file
        fields = {} if "name" in data else load_job(file).data.model_dump(exclude_unset=True)
        section = json.dumps({**fields, **data})
        settings = (*ONE_THREAD, *pattern.overrides, f"data={section}", *overrides)
        self.job = load_job(file, settings)
        self.learner = open_learner(self.job)

    def probe(self, size: int, job: Job | None = None) -> Probe:
        """Measure a size with the job's settings."""
        section = (job or self.job).batch_size_search
        assert section is not None
        sampler = open_probe_sampler(section, self.learner.device, 1)
        return measure(probed_training(self.learner), size, section, sampler)

    def search(self, strategy: str, initial: int, max_loops: int) -> list[Probe]:
        """Search as the job's strategy, or the other one, does; the last probe is the choice's."""
        section = {"strategy": strategy, "initial": initial, "max_loops": max_loops}
        section["utilization_period_s"] = 0.2
        values = self.job.model_dump(exclude_unset=True) | {"batch_size_search": section}
        job = Job.model_validate(values)
        assert job.batch_size_search is not None
        size = self.learner.info.train_size
        decides = build_strategy(job.batch_size_search, SizeBounds(size, size))
        probes: list[Probe] = []
        while not isinstance(proposal := decides.propose(probes), BatchSizeChoice):
            probes.append(self.probe(proposal.batch_size, job))
        return [*probes, self.probe(proposal.batch_size, job)]


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    result: dict[str, dict[Any, Any]] = {}
    with TemporaryDirectory() as folder:
        cifar = TASK.prepare(args.data_root, Path(folder)) | _NO_VALIDATION
        files = write_jpegs(args.data_root, Path(folder) / "imagenet")
        parts: dict[str, Callable[[], dict[Any, Any]]] = {
            "sweep": lambda: {
                pattern.title: sweep(Probed(pattern, cifar), args.sizes, args.repeats)
                for pattern in PATTERNS[:2]
            },
            "search": lambda: searches(cifar, files, args.repeats, args.max_loops),
            "idle": lambda: idle(cifar, files, args.repeats),
        }
        for name in args.parts:
            result[name] = parts[name]()
            print(f"{name}; the paper: {PAPER[name]}")
            for key, values in result[name].items():
                print(f"  {key}: {values}", flush=True)
    if "sweep" in result:
        write_plot(args.plot, lambda axes: _paint(axes, result["sweep"]))
    about = {"paper": PAPER, "machine": machine(), "versions": versions()}
    print(json.dumps(finite({**result, **about})))


def sweep(probed: Probed, sizes: Sequence[int], repeats: int) -> dict[int, dict[str, Any]]:
    """Return milliseconds per image and the utilization by size, over passes in turn."""
    probes: dict[int, list[Probe]] = {size: [] for size in sizes}
    for _ in range(repeats):
        for size, of_size in probes.items():
            of_size.append(probed.probe(size))
    return {
        size: {
            "ms": spread([1e3 / probe.samples_per_s for probe in of_size]),
            "cpu_utilization_pct": spread([probe.utilization_mean_pct for probe in of_size]),
        }
        for size, of_size in probes.items()
    }


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return median, lowest and highest value."""
    return round(median(values), 2), round(min(values), 2), round(max(values), 2)


def searches(
    cifar: Mapping[str, Any], files: Path, repeats: int, max_loops: int
) -> dict[str, dict[str, Any]]:
    """Return what the two published strategies choose, beside the paper's tables 3 to 7."""
    rows: dict[str, dict[str, Any]] = {}
    for pattern in PATTERNS:
        on_files = pattern.file == IMAGENET
        probed = Probed(pattern, {"root": str(files)} if on_files else cifar)
        usage: Any = "needs a GPU, or a CPU with full-size networks"
        if not on_files:
            first = int(pattern.usage[1])
            found = [probed.search("gpu_usage_maximize", first, max_loops) for _ in range(repeats)]
            usage = [
                (
                    len(p) - 1,
                    p[-1].batch_size,
                    *(round(q.utilization_pct, 1) for q in (p[0], p[-1])),
                )
                for p in found
            ]
        first = int(pattern.epoch_time[1])
        found = [probed.search("epoch_time_minimize", first, max_loops) for _ in range(repeats)]
        rows[pattern.title] = {
            "usage_paper": pattern.usage,
            "usage": usage,
            "epoch_time_paper": pattern.epoch_time,
            "epoch_time": [(len(p) - 1, p[-1].batch_size, _shorter_pct(p)) for p in found],
        }
    return rows


def _shorter_pct(probes: Sequence[Probe]) -> float:
    """Return how much less time an image takes at the end of a search, in percent."""
    return round(100 * (1 - probes[0].samples_per_s / probes[-1].samples_per_s), 1)


def idle(cifar: Mapping[str, Any], files: Path, repeats: int) -> dict[str, dict[str, Any]]:
    """Return the milliseconds of each part of an iteration, by the way of reading the images."""
    jpegs = {"root": str(files)}
    ways = {
        "CIFAR-100": (PATTERNS[0], cifar, 0.0),
        "ImageNet": (PATTERNS[3], jpegs, 0.0),
        "ImageNet, slow disk": (PATTERNS[3], jpegs, SLOW_FILE_S),
        "ImageNet, slow disk, 2 loaders": (
            PATTERNS[3],
            {**jpegs, "loader_workers": 2},
            SLOW_FILE_S,
        ),
    }
    rows: dict[str, dict[str, Any]] = {}
    for way, (pattern, data, wait_s) in ways.items():
        with slow_files(wait_s):
            probed = Probed(pattern, data)
            probes = [probed.probe(JPEG_BATCH) for _ in range(repeats)]
            probed.learner.close()
        rows[way] = {
            part.removesuffix("_s"): spread([1e3 * p.timings_s[part] for p in probes])
            for part in probes[0].timings_s
        }
    return rows


@contextmanager
def slow_files(wait_s: float) -> Iterator[None]:
    """Let the product wait before it reads a file; loader processes, forks, wait too."""
    read = ImageFolderSource.content

    def content(source: ImageFolderSource, split: Any, index: int) -> bytes:
        time.sleep(wait_s)
        return read(source, split, index)

    with mock.patch.object(ImageFolderSource, "content", content):
        yield


def write_jpegs(root: Path, folder: Path) -> Path:
    """Write Imagenette's images at the size of ImageNet's files, as an image folder."""
    with np.load(root / "small" / "imagenette224_small.npz") as stored:
        blob, ends, labels = (stored[f"train_{name}"] for name in ("blob", "ends", "y"))
    starts = [0, *ends[:-1]]
    for number in range(JPEG_FILES):
        content = blob[starts[number] : ends[number]].tobytes()
        image = Image.open(io.BytesIO(content)).convert("RGB").resize((500, 375))
        for split in ("train", "val"):
            target = folder / split / f"{labels[number]}" / f"{number}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            image.save(target, "JPEG", quality=95)
    return folder


def _paint(axes: Any, sweeps: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> None:
    for title, by_size in sweeps.items():
        sizes = sorted(by_size)
        times = np.array([by_size[size]["ms"] for size in sizes])
        middle, lowest, highest = times.T
        bars = (middle - lowest, highest - middle)
        axes.errorbar(sizes, middle, bars, marker=".", label=title)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("images per batch")
    axes.set_ylabel("milliseconds per image")


def _arguments() -> argparse.Namespace:
    parser = paper_parser(__doc__, "two hours")
    parser.add_argument("--repeats", type=int, help="passes; default 1 with --quick, else 3")
    parser.add_argument("--max-loops", type=int, help="of a search; default 8 with --quick")
    parser.add_argument("--parts", nargs="+", default=["idle", "search", "sweep"])
    args = parser.parse_args()
    args.sizes = sorted({*SIZES, *JUMP_SIZES}) if args.full else QUICK_SIZES
    args.repeats = args.repeats or (3 if args.full else 1)
    args.max_loops = args.max_loops or (100 if args.full else 8)
    return args


if __name__ == "__main__":
    main()
