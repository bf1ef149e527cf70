"""Batch-size finders against a sweep on a GPU, and a size that runs out of its memory.

    python -m benchmarks.gpu_batch_size_search [--cases vgg16_32 ...] [--repeats 1] [--pairs 3]

ResNet-50 and VGG16, each for 32x32 images (the package's cifar_resnet50 and vgg16_bn) and for
224x224 (torchvision's), with SGD, bf16 autocast and channels_last. The images are random uint8
pixels in CPU memory, a few hundred that stand for a set of a million; a DataLoader in the process
gathers a batch at once, so that loading does not set the pace. No Ray, no downloads, one process.

For each case, as in batch_size_search.py: the sweep, the package's three strategies (bounded by
memory and `--max-batch-size`), and each choice beside the best size of the sweep. Utilization is
NVML's, sampled every 0.2 s; where NVML cannot watch the GPU (MIG), the process' CPU time.
A size of the sweep that does not fit counts as 0 samples/s.

`out_of_memory`: a size that would need twice the GPU's memory, judged by the peak of the best
size. The probe reports it in `status` and `why` and the process continues:
`samples_per_s_before` and `_after` are the best size's on both sides of it.

Each case prints its JSON object when it is done; the last line holds all of them. Use a GPU that
nobody else uses. Exit code 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.batch_size_common import (
    Training,
    add_arguments,
    compare,
    say,
    sgd_training,
    strategies,
)
from benchmarks.common import finite, machine
from raytrain_opt.config.batch_size import ThroughputKneeSearch
from raytrain_opt.config.schema import ModelSection
from raytrain_opt.errors import ResourcesError
from raytrain_opt.recording.recorder import versions
from raytrain_opt.train.batch_size_probe import open_probe_sampler

SIZES = [8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]
SET_SAMPLES = 2**20


@dataclass(frozen=True)
class Case:
    """A network and its images; `distinct` images are kept in memory."""

    model: str
    pixels: int
    classes: int
    distinct: int


CASES = {
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
    parser = _parser()
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(
            2,
            "gpu_batch_size_search needs an NVIDIA GPU, and torch sees none (CUDA is not "
            "available). Without one: python -m benchmarks.batch_size_search\n",
        )
    sampler = _sampler()
    results = {}
    for name in args.cases:
        say(f"== {name}")
        results[name] = finite(run_case(CASES[name], sampler, args))
        say(json.dumps({name: results[name]}))
    setting = {**vars(args), "sampler": sampler, "machine": machine(), "versions": versions()}
    print(json.dumps({"cases": results, **setting}))


def run_case(case: Case, sampler: str, args: argparse.Namespace) -> dict[str, object]:
    training = gpu_training(case, sampler, torch.device("cuda"), args)
    result = compare(training, strategies(training, args.max_loops), args)
    beyond = out_of_memory(training, int(str(result["best_of_sweep"])), args)
    # The next case needs the memory; what this one cached must not count as its peak.
    del training
    torch.cuda.empty_cache()
    return {**result, "out_of_memory": beyond}


def gpu_training(
    case: Case, sampler: str, device: torch.device, args: argparse.Namespace
) -> Training:
    settings: dict[str, Any] = {
        "max_batch_size": args.max_batch_size,
        "max_probe_s": args.max_probe_s,
        "utilization": {"sampler": sampler, "period_s": 0.2},
    }
    return sgd_training(
        ModelSection(name=case.model),
        case.classes,
        (3, case.pixels, case.pixels),
        RandomImages(case),
        device,
        settings=settings,
        autocast=partial(torch.autocast, device.type, dtype=torch.bfloat16),
        loader={"collate_fn": keep_batch},
    )


def out_of_memory(training: Training, size: int, args: argparse.Namespace) -> dict[str, object]:
    """Probe `size`, then a size that needs twice the GPU's memory, then `size` again."""
    probe = partial(training.probe, max_probe_s=args.sweep_max_probe_s)
    before = probe(size)
    total_mib = torch.cuda.get_device_properties(training.device).total_memory / 1024**2
    beyond = too_large(before.peak_memory_mib / size, total_mib)
    failed, after = probe(beyond), probe(size)
    say(f"batch size {beyond}: {failed.status}; {failed.why}")
    return {
        "batch_size": beyond,
        "status": failed.status,
        "why": failed.why,
        "samples_per_s_before": round(before.samples_per_s, 1),
        "samples_per_s_after": round(after.samples_per_s, 1),
    }


def too_large(mib_per_sample: float, total_mib: float) -> int:
    """Return a power of two that would need twice the memory, at most the set's size."""
    return min(SET_SAMPLES, 1 << math.ceil(math.log2(2 * total_mib / mib_per_sample)))


def _sampler() -> str:
    """Return "nvml" if NVML can watch this process's GPU, else "cpu"."""
    settings = {"strategy": "throughput_knee", "utilization": {"sampler": "nvml"}}
    section = ThroughputKneeSearch.model_validate(settings)
    try:
        open_probe_sampler(section, torch.device("cuda"), torch.get_num_threads()).close()
    except ResourcesError as error:
        say(f"measuring the CPU's utilization instead: {error}")
        return "cpu"
    return "nvml"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Batch-size finders against a sweep, on a GPU.")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    add_arguments(
        parser,
        sizes=SIZES,
        passes=2,
        repeats=1,
        pairs=3,
        max_batch_size=None,
        max_probe_s=1.0,
        max_loops=40,
        sweep_max_probe_s=1.0,
    )
    return parser


if __name__ == "__main__":
    main()
