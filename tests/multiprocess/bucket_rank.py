"""One process of `test_buckets`.

Trains with each plan of gradient buckets and writes the results to `folder`/rank-RANK.pt.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from raytrain_opt.config.updates import ParallelSection
from raytrain_opt.train import data_parallel
from raytrain_opt.train.data_parallel import (
    DataParallel,
    begin_communicator_warmup,
    distribute,
)
from tests.support.process_group import gloo_group

CPU = torch.device("cpu")
MICRO_BATCHES = 2
WIDTH, LAYERS = 512, 5
# Fewer steps than the default: the test checks which plans are timed, not how fast they are.
data_parallel.TIMED_STEPS = 2
# The timed steps of four plans, and some steps after them.
STEPS = 1 + 4 * (data_parallel.WARMUP_STEPS + data_parallel.TIMED_STEPS) + 3
LR = 2.0**-6

RankResults = dict[str, Any]


class ExactGradients(nn.Module):
    """Five layers of 1 MiB whose gradients are integers, so that any sum is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        for index, parameter in enumerate(self.parameters()):
            nn.init.zeros_(parameter)
            pattern = torch.arange(parameter.numel()) % (11 + index)
            self.register_buffer(f"pattern{index}", pattern.view_as(parameter).float())

    def forward(self, factor: Tensor) -> Tensor:
        total = torch.zeros(())
        for parameter, pattern in zip(self.parameters(), self.buffers(), strict=True):
            total = total + (parameter * pattern).sum()
        return total * factor


def real_net() -> nn.Module:
    """Build a model of the same size, with running statistics and gradients of ordinary size."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, WIDTH, bias=False),
        *[
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU())
            for _ in range(LAYERS)
        ],
        nn.Linear(WIDTH, 8),
    )


def factor(step: int, rank: int, micro_batch: int) -> Tensor:
    return torch.tensor(float((3 * step + 5 * rank + 2 * micro_batch) % 8))


def images(step: int, rank: int, micro_batch: int) -> Tensor:
    seed = 1000 * step + 10 * rank + micro_batch
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))


class Messages:
    """The sizes in bytes of the buckets that DDP sends in each step."""

    def __init__(self) -> None:
        self.sizes_by_step: list[list[int]] = []

    def hook(self, _, bucket):  # type: ignore[no-untyped-def] # DDP reads no annotation in text
        self.sizes_by_step[-1].append(bucket.buffer().nbytes)
        return allreduce_hook(None, bucket)


def update(
    parallel: DataParallel, inputs: Callable[[int, int, int], Tensor], step: int, rank: int
) -> None:
    for micro_batch in range(MICRO_BATCHES):
        with parallel.accumulate(last=micro_batch == MICRO_BATCHES - 1):
            parallel.forward(inputs(step, rank, micro_batch)).mean().backward()


def train(
    model: nn.Module,
    inputs: Callable[[int, int, int], Tensor],
    rank: int,
    steps: int,
    lr: float,
    messages: Messages | None = None,
    **section: Any,
) -> RankResults:
    """Train; return the state, the last gradients and how many replaced DDPs were not freed."""
    parallel = distribute(model, ParallelSection.model_validate(section))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    wrapped, leaked = ref(parallel.forward), 0
    reducer = ref(parallel.forward.reducer)
    fresh = True
    for step in range(steps):
        if messages is not None:
            messages.sizes_by_step.append([])
            if fresh:
                parallel.forward.register_comm_hook(None, messages.hook)
        optimizer.zero_grad()
        update(parallel, inputs, step, rank)
        optimizer.step()
        if step == steps - 1:
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
        parallel.after_step()
        fresh = wrapped() is not parallel.forward
        if fresh:
            leaked += wrapped() is not None or reducer() is not None
            wrapped, reducer = ref(parallel.forward), ref(parallel.forward.reducer)
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": gradients,
        "report": parallel.report(),
        "leaked": leaked,
    }


def train_exact(rank: int, buckets: str) -> RankResults:
    messages = Messages()
    results = train(ExactGradients(), factor, rank, STEPS, LR, messages, gradient_buckets=buckets)
    return {**results, "messages": messages.sizes_by_step}


def connect_early(rank: int, folder: Path) -> float:
    """Connect; the second rank begins only after the first one has begun."""
    marker = folder / "begun"
    while rank > 0 and not marker.exists():
        time.sleep(0.01)
    connection = begin_communicator_warmup(CPU)
    marker.touch()
    return connection.result()


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    plans = ["default", "growing", "auto"]
    with gloo_group(rank, world_size, folder):
        results = {
            "connected_s": connect_early(rank, folder),
            "exact": {plan: train_exact(rank, plan) for plan in plans},
            "real": {
                plan: train(real_net(), images, rank, STEPS, 1e-3, gradient_buckets=plan)
                for plan in plans
            },
            # A learning rate of 0: the last gradients of all trainings have the same weights.
            "constant_weights": {
                f"{buckets} {form}": train(
                    real_net(), images, rank, 3, 0, compression=form, gradient_buckets=buckets
                )
                for form, buckets in (
                    ("none", "default"),
                    ("none", "growing"),
                    ("bf16", "growing"),
                    ("fp16", "growing"),
                )
            },
        }
    torch.save(results, folder / f"rank-{rank}.pt")
