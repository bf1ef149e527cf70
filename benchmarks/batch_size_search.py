"""Batch-size finders against an exhaustive sweep, on real training on CPU or a GPU.

    python -m benchmarks.batch_size_search [--repeats 3] [--pairs 5]
    python -m benchmarks.batch_size_search --cases vgg16_32 resnet50_224 ...     on a GPU

resnet8_28 (the default) trains on the CPU: ResNet-8, momentum SGD, synthetic uint8 images of
Fashion-MNIST's shape in a TensorDataset behind a DataLoader without workers.
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

One finder is not made for a CPU. GpuUsageMaximize sees CPU time (samples of 0.2 s, correct to 5
%), which is close to 100 % at any size when nothing else runs: the published rule then shrinks the
batch. It is left out on a GPU that NVML cannot watch (MIG). To save time, `--max-loops` bounds the
published strategies' probes (100 by default in a job). All other settings are a job's defaults: a
probe of ThroughputKnee ends at a standard error of 2 %, because that strategy repeats noisy sizes,
a probe of the published strategies at 1 %, because they look at each size once.
`--max-probe-s 0.7` makes all probes about equally long.

Measure on a machine with nothing else to do; resnet8_28 takes 6 to 10 minutes on 2 cores. Each
case prints its JSON object when it is done; the last line holds all of them by name.
"""

from __future__ import annotations

import argparse
import json
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median, median_low
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

from benchmarks.common import finite, machine, synthetic_images
from raytrain_opt import MinibatchSizeOptimizer
from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.batch_size import GpuUsageMaximizeSearch, ThroughputKneeSearch
from raytrain_opt.config.schema import ModelSection
from raytrain_opt.errors import ResourcesError
from raytrain_opt.models import build_model
from raytrain_opt.recording.recorder import versions
from raytrain_opt.results import Probe
from raytrain_opt.train.batch_size_finder import endless_batches
from raytrain_opt.train.batch_size_probe import ProbedTraining, measure, open_probe_sampler

STRATEGIES = ("throughput_knee", "epoch_time_minimize", "gpu_usage_maximize")


class PreciseProbes(ThroughputKneeSearch):
    """Settings of a sweep, whose probes are more precise than those of a finder."""

    relative_error: ClassVar[float] = 0.005


@dataclass(frozen=True)
class FinderRun:
    """What one run of a finder chose, and its cost."""

    batch_size: int
    probes: int
    seconds: float


Finder = Callable[[], FinderRun]


class PixelInput(nn.Module):
    """A channels_last network for uint8 images [N, C, H, W], which it scales first."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixels: Tensor) -> Tensor:
        values = pixels.to(torch.float32).sub_(127.5).div_(64)
        return self.network(values.contiguous(memory_format=torch.channels_last))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Training:
    """A training whose batch size is searched.

    `settings` are the job file's, for every finder and measurement; `loader` is for the
    DataLoader.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    dataset: Dataset[Any]
    settings: dict[str, Any]
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    loader: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def find(self, strategy: str, **settings: Any) -> FinderRun:
        """Run one of the package's strategies in this process."""
        started_s = monotonic_s()
        # What is compared is the speed, whatever a training would learn.
        any_size = {"min_updates_per_epoch": 1, "min_updates": 1}
        choice = MinibatchSizeOptimizer(
            strategy, **any_size, **{**self.settings, **settings}
        ).apply(self.model, self.optimizer, self.dataset, autocast=self.autocast, **self.loader)
        return FinderRun(choice.batch_size, len(choice.probes), monotonic_s() - started_s)

    def probe(self, batch_size: int, max_probe_s: float) -> Probe:
        """Measure one size as the finders do, but more precisely."""
        section = PreciseProbes.model_validate(
            {"strategy": "throughput_knee", **self.settings, "max_probe_s": max_probe_s}
        )
        scaler = torch.amp.GradScaler(self.device.type, enabled=False)
        batches = endless_batches(self.dataset, self.device, self.loader)
        training = ProbedTraining(
            self.model,
            self.optimizer,
            lambda batch: cross_entropy(self.model(batch.x), batch.y),
            batches,
            self.device,
            self.autocast,
            scaler,
        )
        sampler = open_probe_sampler(section, self.device, torch.get_num_threads())
        return measure(training, batch_size, section, sampler)


def sgd_training(
    network: ModelSection,
    classes: int,
    shape: tuple[int, ...],
    dataset: Dataset[Any],
    device: torch.device,
    **rest: Any,
) -> Training:
    """Build a network with momentum SGD; `rest` are more fields of `Training`."""
    sizes: dict[str, Any] = {"num_classes": classes, "sample_shape": shape, "seed": 0}
    built = build_model(network, **sizes, channels_last=True)
    model = PixelInput(built).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    return Training(model, optimizer, dataset, **rest)


def strategies(training: Training, max_loops: int) -> dict[str, Finder]:
    """Return the package's finders; `max_loops` bounds the probes of the published ones."""
    return {
        name: partial(training.find, name, **_published(name, max_loops)) for name in STRATEGIES
    }


def _published(strategy: str, max_loops: int) -> dict[str, Any]:
    return {} if strategy == "throughput_knee" else {"max_loops": max_loops}


def compare(
    training: Training, finders: Mapping[str, Finder], args: Namespace
) -> dict[str, object]:
    """Return the sweep, the finders' choices and their regret for the JSON object."""
    rate = partial(_rate, training, args)
    passes = _sweep(rate, args.sizes, args.passes)
    sweep = {size: median(rates) for size, rates in passes.items()}
    best = max(sweep, key=lambda size: sweep[size])
    say(f"best of the sweep: {best}, {sweep[best]:.1f} samples/s")
    runs = _repeated(finders, args.repeats)
    pairs = _pairs_with_best(rate, _choices(runs.values()), best, args.pairs)
    report = {name: _finder_report(finder_runs, pairs) for name, finder_runs in runs.items()}
    knee_s, epoch_time_s = (median(run.seconds for run in runs[n]) for n in STRATEGIES[:2])
    return {
        "finders": report,
        "knee_seconds_over_epoch_time_seconds": round(knee_s / epoch_time_s, 4),
        "best_of_sweep": best,
        "sweep": {str(size): round(value, 1) for size, value in sweep.items()},
        "sweep_passes": {str(size): [round(r, 1) for r in passes[size]] for size in sweep},
    }


def _rate(training: Training, args: Namespace, size: int) -> float:
    """Return samples/s; 0 if the size does not fit into memory."""
    probe = training.probe(size, args.sweep_max_probe_s)
    return probe.samples_per_s if probe.status == "ok" else 0.0


def _sweep(
    rate: Callable[[int], float], sizes: Sequence[int], passes: int
) -> dict[int, list[float]]:
    """Measure every size once per pass, up and down in turn: a drift affects all sizes alike."""
    rates: dict[int, list[float]] = {size: [] for size in sorted(set(sizes))}
    for number in range(passes):
        for size in sorted(rates, reverse=number % 2 == 1):
            rates[size].append(rate(size))
        latest = {size: round(values[-1]) for size, values in rates.items()}
        say(f"sweep {number + 1} of {passes}, samples/s: {latest}")
    return rates


def _repeated(finders: Mapping[str, Finder], repeats: int) -> dict[str, list[FinderRun]]:
    """Run the finders in turn, each time in the opposite order."""
    runs: dict[str, list[FinderRun]] = {name: [] for name in finders}
    for repeat in range(repeats):
        for name in list(finders)[:: 1 if repeat % 2 == 0 else -1]:
            run = finders[name]()
            runs[name].append(run)
            say(
                f"{name}, run {repeat + 1} of {repeats}: {run.batch_size} "
                f"after {run.probes} probes in {run.seconds:.1f} s"
            )
    return runs


@dataclass(frozen=True)
class _Pairs:
    """Samples/s of a size, also as a fraction of the best size's in the same pair."""

    samples_per_s: float
    fraction: float


def _pairs_with_best(
    rate: Callable[[int], float], sizes: Iterable[int], best: int, pairs: int
) -> dict[int, _Pairs]:
    """Return medians over pairs, measured in turn and each time in the opposite order.

    The best size is measured, not compared with itself.
    """
    rates: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    for pair in range(pairs):
        for size, size_rates in rates.items():
            order = (size, best) if pair % 2 == 0 else (best, size)
            measured = {batch_size: rate(batch_size) for batch_size in dict.fromkeys(order)}
            size_rates.append((measured[size], measured[best]))
        say(f"pair {pair + 1} of {pairs} of each choice with the best size")
    return {
        size: _Pairs(median(own for own, _ in rated), median(own / top for own, top in rated))
        for size, rated in rates.items()
    }


def _choices(runs: Iterable[Sequence[FinderRun]]) -> list[int]:
    return sorted({run.batch_size for finder_runs in runs for run in finder_runs})


def _finder_report(runs: Sequence[FinderRun], pairs: Mapping[int, _Pairs]) -> dict[str, object]:
    """Return medians over the runs of a finder; its choices may differ from run to run."""
    choices = [run.batch_size for run in runs]
    return {
        "probes": median(run.probes for run in runs),
        "seconds": round(median(run.seconds for run in runs), 2),
        "choice": median_low(choices),
        "samples_per_s_of_choice": round(median(pairs[c].samples_per_s for c in choices), 1),
        "regret_pct": round(median(100 * (1 - pairs[c].fraction) for c in choices), 2),
        "choices": choices,
        "seconds_all": [round(run.seconds, 2) for run in runs],
    }


say = partial(print, flush=True)


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
    print(json.dumps({**vars(args), **about, "cases": results}))


def run_case(name: str, args: argparse.Namespace) -> dict[str, object]:
    """Return the sweep, the choices and their regret."""
    if name == ON_CPU:
        training = cpu_training(args)
        return compare(training, strategies(training, args.max_loops), args)
    training = gpu_training(GPU_CASES[name], torch.device("cuda"), args)
    finders = strategies(training, args.max_loops)
    if not _is_watched(training.device):
        del finders["gpu_usage_maximize"]
    result = compare(training, finders, args)
    # The next case needs the memory; what this one cached must not count as its peak.
    del training
    torch.cuda.empty_cache()
    return result


def cpu_training(args: argparse.Namespace) -> Training:
    network = ModelSection(name="resnet8", args={"width": args.width})
    device, settings = torch.device("cpu"), _settings(args)
    return sgd_training(network, CPU_CLASSES, CPU_SHAPE, _dataset(args), device, settings=settings)


def gpu_training(case: Case, device: torch.device, args: argparse.Namespace) -> Training:
    return sgd_training(
        ModelSection(name=case.model),
        case.classes,
        (3, case.pixels, case.pixels),
        RandomImages(case),
        device,
        settings=_settings(args),
        autocast=partial(torch.autocast, device.type, dtype=torch.bfloat16),
        loader={"collate_fn": keep_batch},
    )


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "max_batch_size": args.max_batch_size,
        "max_probe_s": args.max_probe_s,
        "utilization_period_s": 0.2,
    }


def _is_watched(device: torch.device) -> bool:
    """Return whether NVML can watch this process's GPU."""
    section = GpuUsageMaximizeSearch(strategy="gpu_usage_maximize")
    try:
        open_probe_sampler(section, device, torch.get_num_threads())
    except ResourcesError as error:
        say(f"without gpu_usage_maximize: {error}")
        return False
    return True


def _dataset(args: argparse.Namespace) -> TensorDataset:
    """Return uint8 images [samples, 1, 28, 28] and labels."""
    images, labels = synthetic_images(args.samples, CPU_SHAPE, CPU_CLASSES)
    pixels = torch.from_numpy(images).view(-1, *CPU_SHAPE)
    return TensorDataset(pixels, torch.from_numpy(labels).long())


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Batch-size finders against a sweep.")
    parser.add_argument("--cases", nargs="+", choices=[ON_CPU, *GPU_CASES], default=[ON_CPU])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--width", type=int, default=16, help="of ResNet-8's first stage")
    parser.add_argument("--samples", type=int, default=4096, help="training images on the CPU")
    parser.add_argument("--sizes", type=int, nargs="+", help="batch sizes of the sweep")
    parser.add_argument("--passes", type=int, default=2, help="passes of the sweep")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each finder")
    parser.add_argument("--pairs", type=int, default=5, help="of a choice beside the best size")
    parser.add_argument("--max-batch-size", type=int, help="for all finders")
    parser.add_argument("--max-probe-s", type=float, help="timed seconds of a finder's probe")
    parser.add_argument("--max-loops", type=int, default=30, help="of the published strategies")
    parser.add_argument(
        "--sweep-max-probe-s", type=float, default=1.2, help="of the sweep and the pairs"
    )
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
