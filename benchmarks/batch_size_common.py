"""What the two batch-size benchmarks share: one training, its finders, the sweep, the regret."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median, median_low
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from raytrain_opt import MinibatchSizeOptimizer
from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.batch_size import ThroughputKneeSearch
from raytrain_opt.config.schema import ModelSection
from raytrain_opt.minibatch import endless_batches
from raytrain_opt.models import build_model
from raytrain_opt.train.probe import Subject, measure, sampler_of
from raytrain_opt.train.probe_result import Probe

STRATEGIES = ("throughput_knee", "epoch_time_minimize", "gpu_usage_maximize")


@dataclass(frozen=True)
class Found:
    """One run of a finder."""

    batch_size: int
    probes: int
    seconds: float


Finder = Callable[[], Found]


class OfPixels(nn.Module):
    """A network that is given uint8 images [N, C, H, W], scales them and wants channels_last."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.to(memory_format=torch.channels_last)

    def forward(self, pixels: Tensor) -> Tensor:
        values = pixels.to(torch.float32).sub_(127.5).div_(64)
        return self.network(values.contiguous(memory_format=torch.channels_last))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Training:
    """What is trained. `settings`: of every finder and measurement, as in the job file;
    `loader`: of the DataLoader.
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

    def find(self, strategy: str, **settings: Any) -> Found:
        """Run a strategy of the package on it, in this process."""
        started_s = monotonic_s()
        choice = MinibatchSizeOptimizer(strategy, **{**self.settings, **settings}).apply(
            self.model, self.optimizer, self.dataset, autocast=self.autocast, **self.loader
        )
        return Found(choice.batch_size, len(choice.probes), monotonic_s() - started_s)

    def probe(self, batch_size: int, precision: float, max_seconds: float) -> Probe:
        """Measure one size, as the finders do."""
        given = {**self.settings, "precision": precision, "max_seconds": max_seconds}
        section = ThroughputKneeSearch.model_validate({"strategy": "throughput_knee", **given})
        scaler = torch.amp.GradScaler(self.device.type, enabled=False)
        batches = endless_batches(self.dataset, self.device, self.loader)
        subject = Subject(
            self.model, self.optimizer, cross_entropy, batches, self.device, self.autocast, scaler
        )
        sampler = sampler_of(section, self.device, torch.get_num_threads())
        try:
            return measure(subject, batch_size, section, sampler)
        finally:
            sampler.close()


def sgd_training(
    network: ModelSection,
    classes: int,
    shape: tuple[int, ...],
    dataset: Dataset[Any],
    device: torch.device,
    **rest: Any,
) -> Training:
    """SGD with momentum on a new network; `rest`: fields of `Training`."""
    built = build_model(network, num_classes=classes, sample_shape=shape, seed=0)
    model = OfPixels(built).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    return Training(model, optimizer, dataset, **rest)


def strategies(training: Training, max_loops: int) -> dict[str, Finder]:
    """The package's own finders; `max_loops` for the published ones."""
    return {
        name: partial(training.find, name, **_published(name, max_loops)) for name in STRATEGIES
    }


def _published(strategy: str, max_loops: int) -> dict[str, Any]:
    return {} if strategy == "throughput_knee" else {"max_loops": max_loops}


def compare(
    training: Training, finders: Mapping[str, Finder], args: Namespace
) -> dict[str, object]:
    """Sweep, finders and regret of one training, for the JSON."""
    rate = partial(_rate, training, args)
    passes = _sweep(rate, args.sizes, args.passes)
    sweep = {size: median(rates) for size, rates in passes.items()}
    best = max(sweep, key=lambda size: sweep[size])
    say(f"best of the sweep: {best}, {sweep[best]:.1f} samples/s")
    runs = _repeated(finders, args.repeats)
    pairs = _pairs_with_best(rate, _choices(runs.values()), best, args.pairs)
    report = {name: _finder(of_finder, pairs) for name, of_finder in runs.items()}
    knee_s, epoch_time_s = (median(f.seconds for f in runs[n]) for n in STRATEGIES[:2])
    return {
        "finders": report,
        "knee_seconds_over_epoch_time_seconds": round(knee_s / epoch_time_s, 4),
        "best_of_sweep": best,
        "sweep": {str(size): round(value, 1) for size, value in sweep.items()},
        "sweep_passes": {str(size): [round(r, 1) for r in passes[size]] for size in sweep},
    }


def _rate(training: Training, args: Namespace, size: int) -> float:
    """Samples/s, 0 where the size does not fit into memory."""
    probe = training.probe(size, args.sweep_precision, args.sweep_max_seconds)
    return probe.samples_per_s if probe.status == "ok" else 0.0


def _sweep(
    rate: Callable[[int], float], sizes: Sequence[int], passes: int
) -> dict[int, list[float]]:
    """Every size once a pass, up and down in turn: a drift of the machine hits all alike."""
    found: dict[int, list[float]] = {size: [] for size in sorted(set(sizes))}
    for number in range(passes):
        for size in sorted(found, reverse=number % 2 == 1):
            found[size].append(rate(size))
        shown = {size: round(rates[-1]) for size, rates in found.items()}
        say(f"sweep {number + 1} of {passes}, samples/s: {shown}")
    return found


def _repeated(finders: Mapping[str, Finder], repeats: int) -> dict[str, list[Found]]:
    """In turn, each time in the opposite order."""
    runs: dict[str, list[Found]] = {name: [] for name in finders}
    for repeat in range(repeats):
        for name in list(finders)[:: 1 if repeat % 2 == 0 else -1]:
            found = finders[name]()
            runs[name].append(found)
            say(
                f"{name}, run {repeat + 1} of {repeats}: {found.batch_size} "
                f"after {found.probes} probes in {found.seconds:.1f} s"
            )
    return runs


@dataclass(frozen=True)
class _Pairs:
    """Samples/s of a size, and the share of the best size's in the same pair."""

    samples_per_s: float
    share: float


def _pairs_with_best(
    rate: Callable[[int], float], sizes: Iterable[int], best: int, pairs: int
) -> dict[int, _Pairs]:
    """Medians over pairs, which are measured in turn and each time in the opposite order.

    The best size loses nothing to itself: it is not compared, only measured.
    """
    rates: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    for pair in range(pairs):
        for size, of_size in rates.items():
            order = (size, best) if pair % 2 == 0 else (best, size)
            measured = {each: rate(each) for each in dict.fromkeys(order)}
            of_size.append((measured[size], measured[best]))
        say(f"pair {pair + 1} of {pairs} of each choice with the best size")
    return {
        size: _Pairs(median(own for own, _ in of_size), median(own / b for own, b in of_size))
        for size, of_size in rates.items()
    }


def _choices(runs: Iterable[Sequence[Found]]) -> list[int]:
    return sorted({found.batch_size for of_finder in runs for found in of_finder})


def _finder(runs: Sequence[Found], pairs: Mapping[int, _Pairs]) -> dict[str, object]:
    """Medians over the runs of a finder; its choices may differ from run to run."""
    choices = [found.batch_size for found in runs]
    return {
        "probes": median(found.probes for found in runs),
        "seconds": round(median(found.seconds for found in runs), 2),
        "choice": median_low(choices),
        "samples_per_s_of_choice": round(median(pairs[c].samples_per_s for c in choices), 1),
        "regret_pct": round(median(100 * (1 - pairs[c].share) for c in choices), 2),
        "choices": choices,
        "seconds_all": [round(found.seconds, 2) for found in runs],
    }


def add_arguments(parser: ArgumentParser, **defaults: object) -> None:
    """Those that `compare` reads, and `--max-seconds` and `--max-loops` for the finders."""
    parser.add_argument("--sizes", type=int, nargs="+", help="of the sweep")
    parser.add_argument("--passes", type=int, help="of the sweep")
    parser.add_argument("--repeats", type=int, help="runs of each finder")
    parser.add_argument("--pairs", type=int, help="measurements of a choice beside the best size")
    parser.add_argument("--max-batch-size", type=int, help="for all finders")
    parser.add_argument("--max-seconds", type=float, help="of a finder's probe, timed")
    parser.add_argument("--max-loops", type=int, help="of the published strategies")
    parser.add_argument("--sweep-precision", type=float, help="of the sweep and the pairs")
    parser.add_argument("--sweep-max-seconds", type=float, help="of one measurement in them")
    parser.set_defaults(**defaults)


def say(line: str) -> None:
    print(line, flush=True)
