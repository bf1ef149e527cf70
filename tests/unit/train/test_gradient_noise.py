"""Norms of the gradients of micro-batches and of their mean, against autograd.grad."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raytrain_opt.config.updates import ParallelSection
from raytrain_opt.train import gradient_noise
from raytrain_opt.train.data_parallel import DataParallel, Parallel
from raytrain_opt.train.micro_batches import MicroBatches

MICRO_BATCHES = 3


def scale(value: Tensor) -> Tensor:
    return value * 1024


class Net(nn.Module):
    """A model with a weight that is used twice, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(6, 5)
        self.twice = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)
        for parameter in self.frozen.parameters():
            parameter.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(torch.relu(self.twice(torch.relu(self.frozen(x)))))
        out: Tensor = self.last(x)
        return out


def batch(index: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(index)
    return torch.randn(8, 6, generator=random), torch.randint(3, (8,), generator=random)


def loss(model: nn.Module, index: int) -> Tensor:
    x, y = batch(index)
    return cross_entropy(model(x), y)


def by_hand(model: nn.Module, indices: range) -> tuple[float, float]:
    """Return the mean of the squared norms, and the squared norm of the mean gradient."""
    trained = [p for p in model.parameters() if p.requires_grad]
    flat = [
        torch.cat([g.flatten() for g in torch.autograd.grad(loss(model, index), trained)])
        for index in indices
    ]
    mean = torch.stack(flat).mean(dim=0)
    small = sum(float(gradient.double().square().sum()) for gradient in flat) / len(flat)
    return small, float(mean.double().square().sum())


def begin_phase(parallel: Parallel, micro_batches: int, steps: int = 1) -> None:
    indices = MicroBatches(range(micro_batches), micro_batches)
    parallel.begin_phase(steps, indices, scale)


def phase(model: nn.Module, micro_batches: int, updates: int, steps: int = 0) -> list[list[float]]:
    parallel = DataParallel(model, ParallelSection())
    begin_phase(parallel, micro_batches, steps or updates)
    for _ in range(updates):
        model.zero_grad()
        for index in range(micro_batches):
            with parallel.accumulate(index):
                scale(loss(parallel.forward, index) / micro_batches).backward()
        parallel.end_backward()
        parallel.after_step()
    return [list(pair) for pair in parallel.take_norms()]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("updates", "measured"), [(1, 1), (10, 1), (11, 2), (21, 3)])
def test_one_update_in_ten_is_measured(updates: int, measured: int) -> None:
    assert gradient_noise.MEASURE_EVERY == 10
    expected = pytest.approx(by_hand(Net(), range(MICRO_BATCHES)), rel=1e-5)
    assert phase(Net(), MICRO_BATCHES, updates) == [expected] * measured


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("stop", "measured"), [(1, [0, 3]), (4, [0, 3]), (5, [1, 2]), (15, [2, 1])]
)
def test_a_phase_that_goes_on_after_a_resume_measures_the_same_steps(
    stop: int, measured: list[int]
) -> None:
    """Of 25 steps the 5th, 15th and 25th."""
    parts = (stop, 25), (25 - stop, 25 - stop)
    assert [len(phase(Net(), MICRO_BATCHES, *part)) for part in parts] == measured


@pytest.mark.usefixtures("group")
def test_a_single_micro_batch_is_not_measured() -> None:
    assert phase(Net(), 1, 3) == []


@pytest.mark.usefixtures("group")
def test_the_measurements_of_an_interrupted_phase_are_dropped() -> None:
    model = Net()
    parallel = DataParallel(model, ParallelSection())
    begin_phase(parallel, MICRO_BATCHES)
    with parallel.accumulate(0):
        scale(loss(parallel.forward, 0) / MICRO_BATCHES).backward()
    begin_phase(parallel, MICRO_BATCHES)
    model.zero_grad()
    for index in range(MICRO_BATCHES):
        with parallel.accumulate(index):
            scale(loss(parallel.forward, index) / MICRO_BATCHES).backward()
    parallel.end_backward()
    assert parallel.take_norms() == (
        pytest.approx(by_hand(model, range(MICRO_BATCHES)), rel=1e-5),
    )
    assert parallel.take_norms() == ()
