"""Batch-size finders against an exhaustive sweep, on real training on CPU or a GPU.

    python -m benchmarks.batch_size_search [--repeats 3] [--pairs 5] [--data-root FOLDER]
    python -m benchmarks.batch_size_search --cases vgg16_32 resnet50_224 ...     on a GPU

resnet8_28 (the default) trains on the CPU: ResNet-8, momentum SGD, synthetic uint8 images of
Fashion-MNIST's shape in a TensorDataset behind a DataLoader without workers; `--data-root` takes
the first `--samples` images of the real set (FOLDER/FashionMNIST/raw, IDX files, gzipped or not).
The other cases need a GPU that nobody else uses: ResNet-50 and VGG16 for 32x32 images (the
package's cifar_resnet50 and vgg16_bn) and for 224x224 (torchvision's), with bf16 autocast, on a
few hundred images that stand for a set of a million, so that loading does not set the pace. No
Ray, no downloads, one process with `--threads` compute threads.

1. Sweep: samples/s of training at each size, measured by the package's own probe but to a smaller
   relative error, in passes of opposite order. `sweep` holds the medians; a size that does not fit
   counts as 0.
2. Finders, `--repeats` times in turn: the package's three strategies through
   `MinibatchSizeOptimizer`.
3. Every choice is measured beside the best size of the sweep, `--pairs` times in turn.

Medians over the runs of each finder: `probes`, `seconds` (the complete call, without imports and
building the network), `choice` (the lower median), `samples_per_s_of_choice`, and `regret_pct` =
100 * (1 - median over pairs of choice / best). The best size is the best of a noisy sweep, so a
choice may beat it: then the regret is negative.

One finder is not made for a CPU. GpuUsageMaximize sees CPU time
(`utilization.sampler: cpu`, samples of 0.2 s, correct to 5 %), which is close to 100 % at any size
when nothing else runs: the published rule then shrinks the batch. So it is on a GPU that NVML
cannot watch (MIG). To save time, `--max-loops` bounds the published strategies' probes (100 by
default in a job). All other settings are a job's defaults: a probe of ThroughputKnee ends at a
standard error of 2 %, because that strategy repeats noisy sizes, a probe of the published
strategies at 1 %, because they look at each size once. `--max-probe-s 0.7` makes all probes about
equally long.

Measure on a machine with nothing else to do; resnet8_28 takes 6 to 10 minutes on 2 cores. Each
case prints its JSON object when it is done; the last line holds all of them by name.
"""

from __future__ import annotations

import argparse
import gzip
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from benchmarks.batch_size_common import (
    Training,
    add_arguments,
    compare,
    say,
    sgd_training,
    strategies,
)
from benchmarks.common import finite, machine, synthetic_images
from raytrain_opt.config.batch_size import ThroughputKneeSearch
from raytrain_opt.config.schema import ModelSection
from raytrain_opt.errors import ResourcesError
from raytrain_opt.recording.recorder import versions
from raytrain_opt.train.batch_size_probe import open_probe_sampler

ON_CPU, CPU_SHAPE, CPU_CLASSES = "resnet8_28", (1, 28, 28), 10
SIZES = [8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
GPU_SIZES = [*SIZES[::2], 1536, 2048]
SET_SAMPLES = 2**20


@dataclass(frozen=True)
class Case:
    """A network and its images on a GPU; `distinct` images are kept in memory."""

    model: str
    pixels: int
    classes: int
    distinct: int


GPU_CASES = {
    "resnet50_32": Case("cifar_resnet50", 32, 10, 8192),
    "vgg16_32": Case("vgg16_bn", 32, 10, 8192),
    "resnet50_224": Case("resnet50", 224, 1000, 512),
    "vgg16_224": Case("vgg16", 224, 1000, 512),
}


class RandomImages(Dataset[tuple[Tensor, Tensor]]):
    """uint8 images [3, pixels, pixels] with labels; image i equals image i % distinct."""

    def __init__(self, case: Case) -> None:
        random = torch.Generator().manual_seed(0)
        shape = (case.distinct, 3, case.pixels, case.pixels)
        self._x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
        self._y = torch.randint(0, case.classes, shape[:1], generator=random)

    def __len__(self) -> int:
        return SET_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._x[index % len(self._y)], self._y[index % len(self._y)]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return a batch at once; the DataLoader's `collate_fn` must be `keep_batch`."""
        rows = torch.tensor(indices) % len(self._y)
        return self._x[rows], self._y[rows]


def keep_batch(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    results = {}
    for name in args.cases:
        say(f"== {name}")
        results[name] = finite(run_case(name, args))
        say(json.dumps({name: results[name]}))
    about = {"machine": machine(), "versions": versions()}
    setting = {key: value for key, value in vars(args).items() if key != "data_root"}
    print(json.dumps({**setting, **about, "cases": results}))


def run_case(name: str, args: argparse.Namespace) -> dict[str, object]:
    """Return the sweep, the choices and their regret."""
    if name == ON_CPU:
        training = cpu_training(args)
        return compare(training, strategies(training, args.max_loops), args)
    training = gpu_training(GPU_CASES[name], torch.device("cuda"), args)
    result = compare(training, strategies(training, args.max_loops), args)
    # The next case needs the memory; what this one cached must not count as its peak.
    del training
    torch.cuda.empty_cache()
    return result


def cpu_training(args: argparse.Namespace) -> Training:
    network = ModelSection(name="resnet8", args={"width": args.width})
    device, settings = torch.device("cpu"), _settings(args, "cpu")
    return sgd_training(network, CPU_CLASSES, CPU_SHAPE, _dataset(args), device, settings=settings)


def gpu_training(case: Case, device: torch.device, args: argparse.Namespace) -> Training:
    return sgd_training(
        ModelSection(name=case.model),
        case.classes,
        (3, case.pixels, case.pixels),
        RandomImages(case),
        device,
        settings=_settings(args, _gpu_sampler(device)),
        autocast=partial(torch.autocast, device.type, dtype=torch.bfloat16),
        loader={"collate_fn": keep_batch},
    )


def _settings(args: argparse.Namespace, sampler: str) -> dict[str, Any]:
    return {
        "max_batch_size": args.max_batch_size,
        "max_probe_s": args.max_probe_s,
        "utilization": {"sampler": sampler, "period_s": 0.2},
    }


def _gpu_sampler(device: torch.device) -> str:
    """Return "nvml" if NVML can watch this process's GPU, else "cpu"."""
    settings = {"strategy": "throughput_knee", "utilization": {"sampler": "nvml"}}
    section = ThroughputKneeSearch.model_validate(settings)
    try:
        open_probe_sampler(section, device, torch.get_num_threads())
    except ResourcesError as error:
        say(f"measuring the CPU's utilization instead: {error}")
        return "cpu"
    return "nvml"


def _dataset(args: argparse.Namespace) -> TensorDataset:
    """Return uint8 images [samples, 1, 28, 28] and labels."""
    if args.data_root is None:
        images, labels = synthetic_images(args.samples, CPU_SHAPE, CPU_CLASSES)
    else:
        raw = Path(args.data_root, "FashionMNIST", "raw")
        images = _idx(raw / "train-images-idx3-ubyte", 16)[: args.samples * 28 * 28].copy()
        labels = _idx(raw / "train-labels-idx1-ubyte", 8)[: args.samples].copy()
    pixels = torch.from_numpy(images).view(-1, *CPU_SHAPE)
    return TensorDataset(pixels, torch.from_numpy(labels).long())


def _idx(path: Path, header_bytes: int) -> Any:
    """Return the bytes of an IDX file after its header, from `path` or `path`.gz."""
    packed = path.with_name(path.name + ".gz")
    data = path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
    return np.frombuffer(data, np.uint8, offset=header_bytes)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Batch-size finders against a sweep.")
    parser.add_argument("--cases", nargs="+", choices=[ON_CPU, *GPU_CASES], default=[ON_CPU])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--width", type=int, default=16, help="of ResNet-8's first stage")
    parser.add_argument("--samples", type=int, default=4096, help="training images on the CPU")
    parser.add_argument("--data-root", help="folder of the real Fashion-MNIST")
    add_arguments(parser)
    args = parser.parse_args(argv)
    on_gpu = args.cases != [ON_CPU]
    if on_gpu and not torch.cuda.is_available():
        parser.exit(2, f"all cases but {ON_CPU} need an NVIDIA GPU, and torch sees none\n")
    if on_gpu and ON_CPU in args.cases:
        parser.error(f"{ON_CPU} is a benchmark of its own")
    defaults: dict[str, Any] = {
        "sizes": GPU_SIZES if on_gpu else SIZES,
        "max_batch_size": None if on_gpu else 1024,
        "max_probe_s": 1.0 if on_gpu else 10.0,
    }
    for name, value in defaults.items():
        setattr(args, name, getattr(args, name) or value)
    if not on_gpu and max(*args.sizes, args.max_batch_size) > args.samples:
        parser.error("--samples must be at least --max-batch-size and all of --sizes")
    return args


if __name__ == "__main__":
    main()
