"""One process of `test_buckets`: python bucket_rank.py RANK WORLD_SIZE FOLDER.

Trains with each plan of gradient buckets and leaves what came of it as FOLDER/rank-RANK.pt.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from ranks import gloo_group
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from raytrain_opt.config.optimizer import ParallelSection
from raytrain_opt.train import group
from raytrain_opt.train.connection import begin_connection
from raytrain_opt.train.group import DataParallel, distribute

CPU = torch.device("cpu")
SHARES = 2
WIDTH, LAYERS = 512, 5
# Fewer than in earnest: what is tried is tried, but not for its speed.
group.COUNTED_STEPS = 2
# Of four plans, and some after them.
STEPS = 1 + 4 * (group.UNCOUNTED_STEPS + group.COUNTED_STEPS) + 3
LR = 2.0**-6

Found = dict[str, Any]


class Exact(nn.Module):
    """Five layers of 1 MiB whose gradients are whole numbers, so that any sum is exact."""

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
    """As large, with statistics of its own in each process, and gradients of common size."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, WIDTH, bias=False),
        *[
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU())
            for _ in range(LAYERS)
        ],
        nn.Linear(WIDTH, 8),
    )


def factor(step: int, rank: int, share: int) -> Tensor:
    return torch.tensor(float((3 * step + 5 * rank + 2 * share) % 8))


def images(step: int, rank: int, share: int) -> Tensor:
    seed = 1000 * step + 10 * rank + share
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))


class Messages:
    """Bytes of the buckets that DDP sends, of each step."""

    def __init__(self) -> None:
        self.of_steps: list[list[int]] = []

    def hook(self, _, bucket):  # type: ignore[no-untyped-def] # DDP reads no annotation in text
        self.of_steps[-1].append(bucket.buffer().nbytes)
        return allreduce_hook(None, bucket)


def update(
    parallel: DataParallel, inputs: Callable[[int, int, int], Tensor], step: int, rank: int
) -> None:
    for share in range(SHARES):
        with parallel.accumulate(last=share == SHARES - 1):
            parallel.forward(inputs(step, rank, share)).mean().backward()


def train(
    model: nn.Module,
    inputs: Callable[[int, int, int], Tensor],
    rank: int,
    steps: int,
    lr: float,
    messages: Messages | None = None,
    **given: Any,
) -> Found:
    """What the model then holds, and how many DDPs outlived their replacement."""
    parallel = distribute(model, ParallelSection.model_validate(given))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    wrapped, leaked = ref(parallel.forward), 0
    reducer = ref(parallel.forward.reducer)
    fresh = True
    for step in range(steps):
        if messages is not None:
            messages.of_steps.append([])
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


def exact(rank: int, buckets: str) -> Found:
    messages = Messages()
    found = train(Exact(), factor, rank, STEPS, LR, messages, buckets=buckets)
    return {**found, "messages": messages.of_steps}


def early_connection(rank: int, folder: Path) -> float:
    """The second rank begins when the first one has begun, and goes on with other things."""
    marker = folder / "begun"
    while rank > 0 and not marker.exists():
        time.sleep(0.01)
    connection = begin_connection(ParallelSection(), CPU)
    marker.touch()
    return connection.wait()


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    plans = ["default", "growing", "auto"]
    with gloo_group(rank, world_size, folder):
        found = {
            "connected_s": early_connection(rank, folder),
            "exact": {plan: exact(rank, plan) for plan in plans},
            "real": {
                plan: train(real_net(), images, rank, STEPS, 1e-3, buckets=plan) for plan in plans
            },
            # Without updates, so that the last gradients are of the same weights.
            "still": {
                f"{buckets} {form}": train(
                    real_net(), images, rank, 3, 0, compression=form, buckets=buckets
                )
                for form, buckets in (
                    ("none", "default"),
                    ("none", "growing"),
                    ("bf16", "growing"),
                    ("fp16", "growing"),
                )
            },
        }
    torch.save(found, folder / f"rank-{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
