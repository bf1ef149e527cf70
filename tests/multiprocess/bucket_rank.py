"""One process of `test_buckets`.

Trains with torch's gradient buckets and with listed ones; writes the results to
`folder`/rank-RANK.pt.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from raytrain_opt.config.updates import ParallelSection
from raytrain_opt.train.data_parallel import begin_communicator_warmup, distribute
from tests.support.process_group import gloo_group

CPU = torch.device("cpu")
MICRO_BATCHES, STEPS = 2, 4
WIDTH, LAYERS = 512, 5
LR = 2.0**-6
LISTED = [1, 2]

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


def train(
    model: nn.Module,
    inputs: Callable[[int, int, int], Tensor],
    rank: int,
    lr: float,
    *,
    note_messages: bool = False,
    **section: Any,
) -> RankResults:
    """Train; return the state, the last gradients and, if noted, the bytes of each message."""
    parallel = distribute(model, ParallelSection.model_validate(section))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    messages: list[list[int]] = []

    def note(_, bucket):  # type: ignore[no-untyped-def] # DDP reads no annotation in text
        messages[-1].append(bucket.buffer().nbytes)
        return allreduce_hook(None, bucket)

    if note_messages:
        parallel.forward.register_comm_hook(None, note)
    for step in range(STEPS):
        messages.append([])
        optimizer.zero_grad()
        for micro_batch in range(MICRO_BATCHES):
            with parallel.accumulate(last=micro_batch == MICRO_BATCHES - 1):
                parallel.forward(inputs(step, rank, micro_batch)).mean().backward()
        optimizer.step()
        parallel.after_step()
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": [parameter.grad.clone() for parameter in model.parameters()],
        "messages": messages,
    }


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
    buckets = {"torch": None, "listed": LISTED}
    with gloo_group(rank, world_size, folder):
        results = {
            "connected_s": connect_early(rank, folder),
            "exact": {
                name: train(
                    ExactGradients(), factor, rank, LR, note_messages=True, gradient_buckets=sizes
                )
                for name, sizes in buckets.items()
            },
            "real": {
                name: train(real_net(), images, rank, 1e-3, gradient_buckets=sizes)
                for name, sizes in buckets.items()
            },
            # A learning rate of 0: the last gradients of all trainings have the same weights.
            "constant_weights": {
                form: train(real_net(), images, rank, 0, compression=form, gradient_buckets=LISTED)
                for form in ("none", "bf16", "fp16")
            },
        }
    torch.save(results, folder / f"rank-{rank}.pt")
