"""Messages of gradients on two processes: the same results in torch's buckets and listed ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raytrain_opt.config.updates import ParallelSection
from raytrain_opt.train.data_parallel import (
    _DDP_ARGUMENTS,
    DataParallel,
    begin_communicator_warmup,
)
from raytrain_opt.train.micro_batches import MicroBatches
from tests.support.process_group import Results, run_ranks

CPU = torch.device("cpu")
MICRO_BATCHES, STEPS = 2, 4
WIDTH, LAYERS = 512, 5
LISTED = [1, 2]


def real_net() -> nn.Module:
    """Build a model of five layers of 1 MiB, with running statistics."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, WIDTH, bias=False),
        *[
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU())
            for _ in range(LAYERS)
        ],
        nn.Linear(WIDTH, 8),
    )


def images(step: int, rank: int, micro_batch: int) -> Tensor:
    seed = 1000 * step + 10 * rank + micro_batch
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))


def train(rank: int, lr: float, **section: Any) -> Results:
    """Train; return the state, the last gradients and the bytes of each bucket."""
    model = real_net()
    parallel = DataParallel(model, ParallelSection.model_validate(section))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    parallel.begin_phase(MicroBatches.all(2 * MICRO_BATCHES))
    messages: list[list[int]] = []
    submit = parallel._sender.submit

    def note(send: Callable[[], Tensor], bucket: Tensor) -> Any:
        messages[-1].append(bucket.nbytes)
        return submit(send, bucket)

    parallel._sender.submit = note  # type: ignore[method-assign]
    for step in range(STEPS):
        messages.append([])
        optimizer.zero_grad()
        for micro_batch in parallel.indices:
            with parallel.accumulate(micro_batch):
                x = images(step, rank, micro_batch % MICRO_BATCHES)
                (parallel.forward(x).mean() / 2).backward()
        parallel.end_backward()
        optimizer.step()
        parallel.after_step()
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": [parameter.grad.clone() for parameter in model.parameters()],
        "messages": messages,
    }


def connect_early(rank: int, folder: Path) -> None:
    """Connect; the second rank begins only after the first one has begun."""
    marker = folder / "begun"
    while rank > 0 and not marker.exists():
        time.sleep(0.01)
    connection = begin_communicator_warmup(CPU)
    marker.touch()
    connection.result()


def run_rank(rank: int, world_size: int, folder: Path) -> Results:
    buckets = {"torch": None, "listed": LISTED}
    connect_early(rank, folder)
    return {
        "buckets": {
            name: train(rank, 1e-3, gradient_buckets=sizes) for name, sizes in buckets.items()
        },
        # A learning rate of 0: the last gradients of all trainings have the same weights.
        "constant_weights": {
            form: train(rank, 0, compression=form, gradient_buckets=LISTED)
            for form in ("none", "bf16", "fp16")
        },
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    return run_ranks(run_rank, 2, tmp_path_factory.mktemp("ranks") / "run")


def test_two_processes_get_the_same_bits_in_any_buckets(ranks: list[Results]) -> None:
    for results in ranks:
        real = results["buckets"]
        assert all(gradient.norm() > 0.01 for gradient in real["listed"]["gradients"])
        for name, value in real["torch"]["state"].items():
            assert torch.equal(real["listed"]["state"][name], value), name


@pytest.mark.skipif("bucket_cap_mb_list" not in _DDP_ARGUMENTS, reason="torch takes one size")
def test_listed_buckets_are_sent_once_per_update(ranks: list[Results]) -> None:
    """A bucket is complete with the gradient that reaches its size: 1 MiB, then 2 MiB."""
    for results in ranks:
        sent = results["buckets"]["listed"]["messages"]
        assert len(sent) == STEPS
        # DDP knows the order of the backward pass from the second step on.
        assert sent[2:] == sent[1:-1]
        gradients = results["buckets"]["listed"]["gradients"]
        assert all(sum(sizes) == sum(g.nbytes for g in gradients) for sizes in sent)
        assert [round(size / 2**20) for size in sent[-1]] == [1, 2, 2, 0]


@pytest.mark.parametrize(
    ("form", "dtype", "error"), [("bf16", torch.bfloat16, 2**-7), ("fp16", torch.float16, 2**-10)]
)
def test_compressed_gradients_are_close_and_were_sent_compressed(
    ranks: list[Results], form: str, dtype: torch.dtype, error: float
) -> None:
    for results in ranks:
        compressed, exact = (results["constant_weights"][f]["gradients"] for f in (form, "none"))
        for gradient, reference in zip(compressed, exact, strict=True):
            assert (gradient - reference).norm() <= error * reference.norm()
            assert torch.equal(gradient, gradient.to(dtype).float())
