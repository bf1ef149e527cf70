"""Milliseconds of one optimizer step on the shapes of ResNet-50: Muon against others.

    python -m benchmarks.muon_step [--rounds 5] [--threads 1] [--torch]
    python -m benchmarks.muon_step --device cuda --batch-size 256     on a GPU, iterations too

    ours         raytrain_opt.optim.Muon: 54 matrices of 21 shapes, SGD for 107 other tensors
    loop         the same with one group per tensor: every matrix computed alone
    torch        torch.optim.Muon on the flattened matrices, torch.optim.SGD for the others, in
                 bfloat16: many CPUs need minutes for it, so there only with --torch, and once
    sgd          torch.optim.SGD, foreach, one group

Momentum 0.9, no weight decay, float32, each side on tensors of its own with constant gradients.
On CPU ours and loop compute in float32, on a GPU in bfloat16. What the timers cover, and the
complete iterations (on a GPU or with --iteration; target of the second command: iteration_over_sgd
at most 1.03), are those of benchmarks/lars_step.py, as are the other options.

`shared_over_ours` is not measured: it is the work of the busiest of 2, 4 and 8 ranks, as a
fraction of the work of one, by the multiplications of each matrix.

The last line printed is one JSON object; `ms_*` are medians.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.common import machine
from benchmarks.lars_step import Step, Work, arguments, iteration, ratio, take_turns
from raytrain_opt.optim import Muon
from raytrain_opt.optim.muon import split_work
from raytrain_opt.optim.parameter_groups import parameter_groups
from raytrain_opt.recording.recorder import versions

MOMENTUM = 0.9
Make = Callable[[nn.Module], Any]


def main() -> None:
    args = arguments("muon_step", lambda p: p.add_argument("--torch", action="store_true"))
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    makers, on_gpu = sides(), device.type == "cuda"
    fast = makers if on_gpu else {n: make for n, make in makers.items() if n != "torch"}
    times = take_turns(steps(fast, device), args.rounds, args.steps, device)
    if args.torch and not on_gpu:
        slow = steps({"torch": makers["torch"]}, device)
        times |= take_turns(slow, 1, 1, device, warm_ups=0)
    result: dict[str, object] = {
        "ours_over_sgd": ratio(times, "ours", "sgd"),
        "loop_over_ours": ratio(times, "loop", "ours"),
        "shared_over_ours": shared_work(),
        **{f"ms_{name}": round(median(values), 3) for name, values in times.items()},
    }
    if "torch" in times:
        result["torch_over_ours"] = round(median(times["torch"]) / median(times["ours"]), 3)
    if args.iteration or on_gpu:
        result |= iteration(args, device, makers)
    setting = {"device": args.device, "threads": args.threads, "rounds": args.rounds}
    print(json.dumps({**result, **setting, "machine": machine(), "versions": versions()}))


def steps(makers: dict[str, Make], device: torch.device) -> dict[str, Work]:
    return {name: Step(make, device).optimizer.step for name, make in makers.items()}


def sides() -> dict[str, Make]:
    """Return the function that makes each side's optimizer."""
    return {
        "ours": lambda m: Muon(_groups(m), lr=0.1, momentum=MOMENTUM),
        "loop": lambda m: Muon(
            [{**group, "params": [p]} for group in _groups(m) for p in group["params"]],
            lr=0.1,
            momentum=MOMENTUM,
        ),
        "torch": _TorchMuon,
        "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=MOMENTUM, foreach=True),
    }


class _TorchMuon:
    """torch's Muon, with each filter bank as a matrix over the same memory, and SGD."""

    def __init__(self, model: nn.Module) -> None:
        matrices, others = [group["params"] for group in _groups(model)]
        self._pairs = [(p, nn.Parameter(p.detach().flatten(1))) for p in matrices]
        self._muon = torch.optim.Muon(
            [matrix for _, matrix in self._pairs], lr=0.1, momentum=MOMENTUM, weight_decay=0.0
        )
        self._sgd = torch.optim.SGD(others, lr=0.1, momentum=MOMENTUM, foreach=True)

    def step(self) -> None:
        for param, matrix in self._pairs:
            assert param.grad is not None
            matrix.grad = param.grad.flatten(1)
        self._muon.step()  # type: ignore[no-untyped-call]
        self._sgd.step()


def shared_work() -> dict[int, float]:
    """Return the work of the busiest rank as a fraction of all, for numbers of ranks."""
    import torchvision

    model = torchvision.models.resnet50()
    shapes = [p.flatten(1).shape for p in _groups(model)[0]["params"]]
    work = [min(shape) * shape.numel() for shape in shapes]
    busiest = {
        ranks: max(sum(work[i] for b in own for i in b) for own in split_work(shapes, ranks))
        for ranks in (2, 4, 8)
    }
    return {ranks: round(most / sum(work), 3) for ranks, most in busiest.items()}


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    return parameter_groups(model, exclude_bias_and_norm=True, use_muon=True)


if __name__ == "__main__":
    main()
