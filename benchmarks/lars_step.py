"""Milliseconds of one optimizer step on ResNet-50's parameters: LARS against others.

    python -m benchmarks.lars_step [--device cuda] [--rounds 7] [--threads 1]

    ours         raytrain_opt.optim.LARS; biases and normalization in their own group (107 of
                 161 tensors)
    literal      the same formula in plain Python, a layer at a time (tests/support)
    timm         timm.optim.lars.Lars, foreach, the same groups
    sgd          torch.optim.SGD, foreach, one group: a training without LARS
    sgd_fused    the same, fused

All with momentum 0.9 and weight decay, float32, each on tensors of its own with constant
gradients. The timer covers `--steps` calls of step() and, on a GPU, the wait for the last of
them; so the CPU's work counts where the device does not hide it. Warmed up before. The sides take
turns within a round, in an order that rotates; a ratio is the median over the rounds of the ratio
within one.

On a GPU (or with --iteration), `iteration_over_sgd` compares complete training iterations of
torchvision's ResNet-50: forward in bf16, backward, step, zero_grad; channels_last, images that
lie on the device; ours against foreach SGD.

The last line printed is one JSON object; `ms_*` are medians. Targets on a GPU: ours_over_sgd at
most 1.5, iteration_over_sgd at most 1.01, literal_over_ours at least 5; on a CPU at least 1.
Needs timm. On 2 cores it takes about half a minute.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torchvision
from torch import nn

from benchmarks.common import machine
from raytrain_opt.optim import LARS
from raytrain_opt.optim.parameter_groups import parameter_groups
from raytrain_opt.recording.recorder import versions

SETTINGS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-5}
Work = Callable[[], object]


def main() -> None:
    args = arguments("lars_step")
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    steps = {name: Step(make, device) for name, make in sides().items()}
    works: dict[str, Work] = {name: step.optimizer.step for name, step in steps.items()}
    times = take_turns(works, args.rounds, args.steps, device)
    result: dict[str, object] = {
        "ours_over_sgd": ratio(times, "ours", "sgd"),
        "literal_over_ours": ratio(times, "literal", "ours"),
        "ours_over_sgd_fused": ratio(times, "ours", "sgd_fused"),
        "timm_over_ours": ratio(times, "timm", "ours"),
        **{f"ms_{name}": round(median(values), 4) for name, values in times.items()},
    }
    del steps, works
    if args.iteration or device.type == "cuda":
        result |= iteration(args, device, sides())
    setting = {"device": args.device, "threads": args.threads, "rounds": args.rounds}
    print(json.dumps({**result, **setting, "machine": machine(), "versions": versions()}))


def sides() -> dict[str, Callable[[nn.Module], torch.optim.Optimizer]]:
    """Return the function that makes each side's optimizer."""
    from timm.optim.lars import Lars

    from tests.support.reference_lars import ReferenceLARS

    def grouped(make: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
        return lambda m: make(parameter_groups(m, exclude_bias_and_norm=True), **SETTINGS)

    return {
        "ours": grouped(LARS),
        "literal": grouped(ReferenceLARS),
        "timm": grouped(Lars),
        "sgd": lambda m: torch.optim.SGD(m.parameters(), foreach=True, **SETTINGS),
        "sgd_fused": lambda m: torch.optim.SGD(m.parameters(), fused=True, **SETTINGS),
    }


class Step:
    """A ResNet-50 with gradients, and its optimizer."""

    def __init__(
        self, make: Callable[[nn.Module], torch.optim.Optimizer], device: torch.device
    ) -> None:
        torch.manual_seed(0)
        self.model = torchvision.models.resnet50().to(device)
        for param in self.model.parameters():
            param.grad = torch.randn_like(param) * 0.01
        self.optimizer = make(self.model)


def iteration(
    args: argparse.Namespace, device: torch.device, optimizers: dict[str, Any]
) -> dict[str, object]:
    """Compare complete training iterations of ours and SGD."""
    size = args.image_size
    images = torch.randn(args.batch_size, 3, size, size, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (args.batch_size,), device=device)
    works = {name: training(optimizers[name], images, labels) for name in ("ours", "sgd")}
    times = take_turns(works, args.rounds, args.iterations, device)
    return {
        "iteration_over_sgd": ratio(times, "ours", "sgd"),
        **{f"iteration_ms_{name}": round(median(values), 3) for name, values in times.items()},
        "iteration_batch_size": args.batch_size,
    }


def training(
    make: Callable[[nn.Module], torch.optim.Optimizer], images: torch.Tensor, labels: torch.Tensor
) -> Work:
    """Return a function that trains a new model and optimizer for one iteration."""
    device = images.device
    model = torchvision.models.resnet50().to(device, memory_format=torch.channels_last)
    optimizer = make(model)

    def iterate() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return iterate


def take_turns(
    works: dict[str, Work],
    rounds: int,
    repetitions: int,
    device: torch.device,
    warm_ups: int = 3,
) -> dict[str, list[float]]:
    """Return the milliseconds of one execution, for every side and round."""
    for work in works.values():
        for _ in range(warm_ups):
            work()
    times: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(milliseconds(works[name], repetitions, device))
    return times


def milliseconds(work: Work, repetitions: int, device: torch.device) -> float:
    _wait(device)
    started_s = perf_counter()
    for _ in range(repetitions):
        work()
    _wait(device)
    return (perf_counter() - started_s) / repetitions * 1e3


def ratio(times: dict[str, list[float]], numerator: str, denominator: str) -> float:
    pairs = zip(times[numerator], times[denominator], strict=True)
    return round(median(a / b for a, b in pairs), 4)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def arguments(
    name: str, add_arguments: Callable[[argparse.ArgumentParser], object] = lambda _: None
) -> argparse.Namespace:
    """Return the arguments of the benchmark `name`, of which some are its own."""
    parser = argparse.ArgumentParser(prog=name, description="A step on ResNet-50's parameters.")
    add_arguments(parser)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, help="per timing; default 3, on a GPU 50")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--iteration", action="store_true", help="complete iterations on CPU too")
    parser.add_argument("--iterations", type=int, help="per timing; default 1, on a GPU 10")
    parser.add_argument("--batch-size", type=int, default=128, help="of a complete iteration")
    parser.add_argument("--image-size", type=int, default=224, help="of a complete iteration")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    on_gpu = args.device == "cuda"
    args.steps = args.steps or (50 if on_gpu else 3)
    args.iterations = args.iterations or (10 if on_gpu else 1)
    return args


if __name__ == "__main__":
    main()
