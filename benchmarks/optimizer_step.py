"""Milliseconds of one optimizer step on the shapes of ResNet-50: LARS or Muon against others.

    python -m benchmarks.optimizer_step lars|muon [--device cuda] [--rounds 7] [--threads 1]
        [--torch]

lars    ours         `large_batch.LARS`; biases and normalization in their own group (107 of
                     161 tensors)
        literal      the same formula in plain Python, a layer at a time (tests/support)
        timm         timm.optim.lars.Lars, foreach, the same groups (needs timm)
        sgd          torch.optim.SGD, foreach, one group: a training without LARS
        sgd_fused    the same, fused
muon    ours         `muon.Muon`: 54 matrices of 21 shapes, SGD for 107 other tensors
        torch        torch.optim.Muon on the flattened matrices, torch.optim.SGD for the others,
                     in bfloat16: many CPUs need minutes, so there only with --torch, and once
        sgd          as above

All with momentum 0.9, float32, each on tensors of its own with constant gradients. The timer
covers `--steps` calls of step() and, on a GPU, the wait for the last of them; so the CPU's work
counts where the device does not hide it. Warmed up before. The sides take turns within a round, in
an order that rotates; a ratio is the median over the rounds of the ratio within one.

Complete training iterations with these optimizers are in gpu_train.

The last line printed is one JSON object; `ms_*` are medians. On 2 cores lars takes about half a
minute.
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
from raytrain_opt.optim.factory import parameter_groups
from raytrain_opt.optim.large_batch import LARS
from raytrain_opt.optim.muon import Muon
from raytrain_opt.recording.recorder import versions

MOMENTUM = 0.9
SETTINGS: dict[str, Any] = {"lr": 0.1, "momentum": MOMENTUM, "weight_decay": 5e-5}
Work = Callable[[], object]
Make = Callable[[nn.Module], Any]


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    device, makers = torch.device(args.device), SIDES[args.optimizer]()
    on_gpu = device.type == "cuda"
    slow = {"torch": makers.pop("torch")} if "torch" in makers and not on_gpu else {}
    times = take_turns(steps(makers, device), args.rounds, args.steps, device)
    if args.torch:
        times |= take_turns(steps(slow, device), 1, 1, device, warm_ups=0)
    result: dict[str, object] = {"ours_over_sgd": ratio(times, "ours", "sgd")}
    others = [name for name in times if name not in ("ours", "sgd", "torch")]
    result |= {f"{name}_over_ours": ratio(times, name, "ours") for name in others}
    if "torch" in times:
        result["torch_over_ours"] = round(median(times["torch"]) / median(times["ours"]), 3)
    result |= {f"ms_{name}": round(median(values), 4) for name, values in times.items()}
    print(json.dumps({**result, **vars(args), "machine": machine(), "versions": versions()}))


def lars_sides() -> dict[str, Make]:
    """Return the function that makes each side's optimizer."""
    from timm.optim.lars import Lars

    from tests.support.reference_lars import ReferenceLARS

    def grouped(make: Any) -> Make:
        return lambda m: make(parameter_groups(m, exclude_bias_and_norm=True), **SETTINGS)

    return {
        "ours": grouped(LARS),
        "literal": grouped(ReferenceLARS),
        "timm": grouped(Lars),
        "sgd": lambda m: torch.optim.SGD(m.parameters(), foreach=True, **SETTINGS),
        "sgd_fused": lambda m: torch.optim.SGD(m.parameters(), fused=True, **SETTINGS),
    }


def muon_sides() -> dict[str, Make]:
    """Return the function that makes each side's optimizer."""
    return {
        "ours": lambda m: Muon(_muon_groups(m), lr=0.1, momentum=MOMENTUM),
        "torch": _TorchMuon,
        "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=MOMENTUM, foreach=True),
    }


SIDES = {"lars": lars_sides, "muon": muon_sides}


class _TorchMuon:
    """torch's Muon, with each filter bank as a matrix over the same memory, and SGD."""

    def __init__(self, model: nn.Module) -> None:
        matrices, others = [group["params"] for group in _muon_groups(model)]
        self._pairs = [(p, nn.Parameter(p.detach().flatten(1))) for p in matrices]
        self._muon = torch.optim.Muon(
            [matrix for _, matrix in self._pairs], lr=0.1, momentum=MOMENTUM, weight_decay=0.0
        )
        self._sgd = torch.optim.SGD(others, lr=0.1, momentum=MOMENTUM, foreach=True)

    def zero_grad(self) -> None:
        for param, _ in self._pairs:
            param.grad = None
        self._sgd.zero_grad()

    def step(self) -> None:
        for param, matrix in self._pairs:
            assert param.grad is not None
            matrix.grad = param.grad.flatten(1)
        self._muon.step()  # type: ignore[no-untyped-call]
        self._sgd.step()


def _muon_groups(model: nn.Module) -> list[dict[str, Any]]:
    return parameter_groups(model, exclude_bias_and_norm=True, use_muon=True)


def steps(makers: dict[str, Make], device: torch.device) -> dict[str, Work]:
    """Return the step of each side, on a ResNet-50 of its own with gradients."""
    return {name: _with_gradients(make, device).step for name, make in makers.items()}


def _with_gradients(make: Make, device: torch.device) -> Any:
    torch.manual_seed(0)
    model = torchvision.models.resnet50().to(device)
    for param in model.parameters():
        param.grad = torch.randn_like(param) * 0.01
    return make(model)


def take_turns(
    works: dict[str, Work], rounds: int, repetitions: int, device: torch.device, warm_ups: int = 3
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
            times[name].append(_milliseconds(works[name], repetitions, device))
    return times


def _milliseconds(work: Work, repetitions: int, device: torch.device) -> float:
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


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A step on ResNet-50's parameters.")
    parser.add_argument("optimizer", choices=SIDES)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, help="per timing; default 3, on a GPU 50")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--torch", action="store_true", help="torch's Muon on CPU too, once")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    on_gpu = args.device == "cuda"
    args.steps = args.steps or (50 if on_gpu else 3)
    return args


if __name__ == "__main__":
    main()
