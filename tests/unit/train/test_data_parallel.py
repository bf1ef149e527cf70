"""Data parallelism of one process: buckets, unused parameters, compression, connecting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raytrain_opt.config.updates import ParallelSection
from raytrain_opt.errors import JobError, UserCodeError
from raytrain_opt.train.data_parallel import DataParallel, Parallel, begin_communicator_warmup
from raytrain_opt.train.micro_batches import MicroBatches
from raytrain_opt.train.phase import Phase, failed_steps

CPU = torch.device("cpu")


class Partial(nn.Module):
    """A model that uses one of its trainable layers only."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.used = nn.Linear(1, 1), nn.Linear(4, 3)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


def section(**values: Any) -> ParallelSection:
    return ParallelSection.model_validate(values)


def step(parallel: Parallel) -> None:
    with parallel.accumulate(0):
        parallel.forward(torch.ones(2, 4)).sum().backward()
    parallel.end_backward()
    parallel.after_step()


def test_a_single_process_uses_the_bare_model() -> None:
    model = nn.Linear(4, 2)
    parallel = Parallel(model, section())
    step(parallel)
    assert parallel.forward is model
    assert model.weight.grad is not None


@pytest.mark.usefixtures("group")
def test_several_processes_use_ddp() -> None:
    parallel = DataParallel(nn.Linear(4, 2), section(gradient_buckets=[1, 2]))
    assert isinstance(parallel.forward, DistributedDataParallel)
    step(parallel)


@pytest.mark.parametrize("sizes", [[], [0], [1, -2], "growing", 4])
def test_sizes_of_buckets_are_positive(sizes: Any) -> None:
    with pytest.raises(ValidationError):
        section(gradient_buckets=sizes)


@pytest.mark.usefixtures("group")
def test_parameters_without_a_gradient_must_be_frozen() -> None:
    with pytest.raises(JobError, match=r"model\.freeze: .*\(unused\.weight, unused\.bias\)"):
        step(DataParallel(Partial(), section()))


@pytest.mark.parametrize("compression", ["bf16", "fp16"])
def test_compression_rounds_each_micro_batch_and_each_sum_in_one_process_too(
    compression: str,
) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[compression]
    model = nn.Linear(4, 2)
    parallel = Parallel(model, section(compression=compression))
    parallel.begin_phase(MicroBatches.all(3))
    x = torch.rand(3, 2, 4)
    for number in parallel.indices:
        with parallel.accumulate(number):
            model(x[number]).sum().backward()
    parallel.end_backward()
    rows = x.sum(1).to(dtype)
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad[0], (rows[0] + rows[1] + rows[2]).float())


def test_a_rank_whose_gradients_nobody_waits_for_says_what_it_raised() -> None:
    """The others wait in a collective of the model's own, and the exchange breaks."""
    micro_batches = MicroBatches(range(1), 1)
    phase = Phase(1, micro_batches, search=True, held_out=0)

    def exchange() -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:545] Read error: connection reset")

    with (
        pytest.raises(UserCodeError, match=r"ValueError: planted \(at .*test_data_parallel.py:"),
        failed_steps(phase, nn.Linear(1, 1), exchange),
    ):
        raise ValueError("planted")


def test_the_error_of_an_early_connection_is_raised_by_wait() -> None:
    connection = begin_communicator_warmup(CPU)
    with pytest.raises(ValueError, match="process group has not been initialized"):
        connection.result()
