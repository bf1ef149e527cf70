"""Serizawa and Tatebe: the mini-batch size for speed. What a CPU can show of it.

    python -m benchmarks.papers.mbso (--quick | --full) [--repeats N] [--data-root FOLDER]

sweep       microseconds per image of training at batches of 10 to 500, as in the preliminary
            experiment: jobs/cifar100_vgg16_mbso.yaml with its VGG16 (one BatchNorm) and
            `cifar_resnet45` (45 convolutions in 15 blocks, 50 with stem and projections; a
            quarter as wide), 32x32 images, probed as the product's
            search does. Of 96 to 106, between which the paper's epoch time jumps unexplained
            (from 47.13 to 69.17 % less than at 32 images), every even size
epoch_time  tables 5 and 6 for CIFAR-100: the product's `epoch_time_minimize` from 32 images, of at
            most `--max-loops`: loops, size, how much shorter an epoch is than at 32 images
networks    why VGG16 keeps a GPU busier: multiply-adds per image and per kernel call of a forward
            pass (torch's FLOP counter and profiler; a call is an operator that computes)
idle        one iteration of a ResNet-8 on patches of JPEG files at the paper's batch of 96, split
            into waiting for data, copying, forward, backward, update: read in the process itself
            as published, from a fast disk and from one that takes 10 ms per file; and with two
            loader processes, the product's default. The paper's GPU idled 1 s per iteration

`--quick` has sizes of 10 to 100 and one pass, `--full` up to 500 and three passes. With
`--data-root` (comparison_tasks.py) the images of sweep and search are those of CIFAR-100, else
made up: times do not depend on what they show. Medians. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import Dataset, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.batch_size_common import Training, sgd_training
from benchmarks.common import machine, synthetic_images
from benchmarks.comparison_tasks import read_cifar100
from benchmarks.papers.trainings import JOBS, paper_parser
from raytrain_opt.config.load import load_job
from raytrain_opt.config.schema import ModelSection
from raytrain_opt.data.images import center_crop
from raytrain_opt.models import build_model
from raytrain_opt.recording.recorder import versions

NETWORKS = ("vgg16_one_bn", "cifar_resnet45")
IMAGE_SHAPE, CLASSES = (3, 32, 32), 100
INITIAL, SIZES, JUMP_SIZES = 32, (10, 20, 50, 100, 200, 500), (96, 98, 100, 102, 104, 106)
JPEG_BATCH, JPEG_FILES, SLOW_FILE_S = 96, 192, 0.01
# Operators that compute; the others of a profile are views, allocations and parts of these.
KERNELS = ("conv2d", "linear", "batch_norm", "relu", "relu_", "max_pool2d", "add_", "mean")
# The ResNet of the sweep is this wide instead of 64: on a CPU it would take 4 times VGG16's time.
SWEEP_ARGS: dict[str, dict[str, Any]] = {"vgg16_one_bn": {}, "cifar_resnet45": {"width": 16}}


class JpegFiles(Dataset[tuple[Tensor, int]]):
    """JPEG files of one folder, read, decoded and cropped as the product does."""

    def __init__(self, files: list[Path], wait_s: float) -> None:
        self._files, self._wait_s = files, wait_s

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self._wait_s)
        pixels = center_crop(self._files[index].read_bytes(), 224)
        return pixels.permute(2, 0, 1), index % 10


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    data = _images(args.data_root)
    trainings = {name: _training(name, data) for name in NETWORKS}
    result: dict[str, dict[Any, Any]] = {
        "networks": {name: arithmetic(name) for name in NETWORKS},
        "epoch_time": {name: epoch_time(trainings[name], args.max_loops) for name in NETWORKS},
        "sweep": {name: sweep(trainings[name], args.sizes, args.repeats) for name in NETWORKS},
        "jump": sweep(trainings[NETWORKS[0]], JUMP_SIZES, args.repeats) if args.full else {},
        "idle": idle(args.repeats),
    }
    for name, rows in result.items():
        print(name)
        for key, values in rows.items():
            print(f"  {key}: {values}")
    print(json.dumps({**result, "machine": machine(), "versions": versions()}))


def arithmetic(network: str) -> dict[str, float]:
    """Count the work of one image and how much of it one kernel call has."""
    model = build_model(
        ModelSection(name=network), num_classes=CLASSES, sample_shape=IMAGE_SHAPE, seed=0
    ).eval()
    image = torch.zeros(1, *IMAGE_SHAPE)
    with torch.no_grad():
        with FlopCounterMode(display=False) as counter:
            model(image)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            model(image)
    calls = sum(
        event.count
        for event in profiled.key_averages()
        if event.key in {f"aten::{kernel}" for kernel in KERNELS}
    )
    multiply_adds = counter.get_total_flops() / 2
    convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    return {
        "convolutions": convolutions,
        "multiply_adds_millions": round(multiply_adds / 1e6, 1),
        "kernel_calls": calls,
        "millions_per_call": round(multiply_adds / 1e6 / calls, 2),
    }


def epoch_time(training: Training, max_loops: int) -> dict[str, float]:
    """Search from 32 images as published; compare an epoch at the choice with one at the start."""
    found = training.find("epoch_time_minimize", initial=INITIAL, max_loops=max_loops)
    micros = sweep(training, (INITIAL, found.batch_size), 3)
    return {
        "loops": found.probes,
        "batch_size": found.batch_size,
        "shorter_pct": round(100 * (1 - micros[found.batch_size] / micros[INITIAL]), 1),
        "search_s": round(found.seconds),
    }


def sweep(training: Training, sizes: tuple[int, ...], repeats: int) -> dict[int, float]:
    """Return microseconds per image by size, the median over passes in turn."""
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(repeats):
        for size in sizes:
            probe = training.probe(size, relative_error=0.02, max_probe_s=6.0)
            times[size].append(1e6 / probe.samples_per_s)
    return {size: round(median(values)) for size, values in times.items()}


def _images(root: Path | None) -> TensorDataset:
    if root is None:
        images, labels = synthetic_images(2 * max(SIZES), IMAGE_SHAPE, CLASSES)
    else:
        (images, labels), _ = read_cifar100(root, IMAGE_SHAPE[1], coarse=False)
        images = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    return TensorDataset(torch.from_numpy(images), torch.from_numpy(labels).long())


def _training(network: str, data: TensorDataset) -> Training:
    model = {"name": network, "args": SWEEP_ARGS[network]}
    job = load_job(JOBS / "cifar100_vgg16_mbso.yaml", [f"model={json.dumps(model)}"])
    settings = {"min_timed_steps": 2, "warmup_steps": 1}
    return sgd_training(
        job.model, CLASSES, IMAGE_SHAPE, data, torch.device("cpu"), settings=settings
    )


def idle(repeats: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each part of an iteration, by the way of reading the files."""
    with TemporaryDirectory() as folder:
        files = _write_jpegs(Path(folder))
        ways = {
            "in the process": (0.0, 0),
            "in the process, slow disk": (SLOW_FILE_S, 0),
            "2 loader processes, slow disk": (SLOW_FILE_S, 2),
        }
        return {way: _parts(files, *how, repeats) for way, how in ways.items()}


def _parts(files: list[Path], wait_s: float, workers: int, repeats: int) -> dict[str, float]:
    patches = "benchmarks.comparison_tasks:resnet8_of_patches"
    model = ModelSection(name=patches, args={"width": 8, "patch": 8})
    training = sgd_training(
        model,
        10,
        (3, 224, 224),
        JpegFiles(files, wait_s),
        torch.device("cpu"),
        settings={"min_timed_steps": 2, "warmup_steps": 1},
        loader={"num_workers": workers},
    )
    probes = [training.probe(JPEG_BATCH, 0.05, 8.0).timings_s for _ in range(repeats)]
    return {part: round(1e3 * median(p[part] for p in probes)) for part in probes[0]}


def _write_jpegs(folder: Path) -> list[Path]:
    """Write files of about 80 kB and 500x375 pixels, as ImageNet has them, and return them."""
    random = np.random.default_rng(0)
    files = []
    for number in range(JPEG_FILES):
        coarse = random.integers(0, 256, (47, 63, 3), dtype=np.uint8)
        content = io.BytesIO()
        image = Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC)
        image.save(content, "JPEG", quality=95)
        files.append(folder / f"{number}.jpg")
        files[-1].write_bytes(content.getvalue())
    return files


def _arguments() -> argparse.Namespace:
    parser = paper_parser(__doc__, "a quarter of an hour")
    parser.add_argument("--repeats", type=int, help="passes; default 1 with --quick, else 3")
    parser.add_argument("--max-loops", type=int, default=40, help="of the published search")
    args = parser.parse_args()
    args.sizes = SIZES if args.full else SIZES[:4]
    args.repeats = args.repeats or (3 if args.full else 1)
    return args


if __name__ == "__main__":
    main()
