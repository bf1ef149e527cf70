"""The batch-size search on the model, optimizer and data set of a user."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from raytrain_opt import MinibatchSizeOptimizer
from raytrain_opt.errors import DataError, JobError

FAST = {"max_probe_s": 0.05, "memory_reserve": 0.0}


class Net(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 24:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x)


def user_training(size: int = 200) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    torch.manual_seed(0)
    model = Net(5, 3)
    data = TensorDataset(torch.randn(size, 5), torch.randint(3, (size,)))
    return model, torch.optim.Adam(model.parameters()), data


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("throughput_knee", {}),
        ("epoch_time_minimize", {"max_loops": 6}),
        ("gpu_usage_maximize", {"max_loops": 6}),
    ],
)
def test_it_chooses_a_measured_size_that_fits(strategy: str, settings: dict[str, object]) -> None:
    model, optimizer, data = user_training()
    before = [p.clone() for p in model.parameters()]
    settings = {**FAST, "utilization_period_s": 0.05, **settings}
    search = MinibatchSizeOptimizer(strategy, initial=8, **settings)
    chosen = search.apply(model, optimizer, data, num_workers=0)
    sizes = {probe.batch_size for probe in chosen.probes if probe.status == "ok"}
    assert chosen.batch_size in sizes
    assert chosen.batch_size <= 24
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert not optimizer.state


def test_sizes_stay_within_the_data_and_the_limit() -> None:
    model, optimizer, data = user_training(size=11)
    chosen = MinibatchSizeOptimizer(initial=32, **FAST).apply(model, optimizer, data)
    assert {probe.batch_size for probe in chosen.probes} <= set(range(1, 12))
    limited = MinibatchSizeOptimizer(initial=2, max_batch_size=4, min_updates_per_epoch=2, **FAST)
    sizes = [p.batch_size for p in limited.apply(model, optimizer, data).probes]
    assert max(sizes) <= 4
    assert len(sizes) > 1
    assert any(a != b for a, b in pairwise(sizes))


def test_enough_updates_are_left_of_the_epochs_that_are_told() -> None:
    model, optimizer, data = user_training(size=400)
    finder = MinibatchSizeOptimizer(initial=2, **FAST)
    for epochs, largest in ((None, 20), (50, 20), (10, 8)):
        chosen = finder.apply(model, optimizer, data, epochs=epochs)
        assert max(probe.batch_size for probe in chosen.probes) <= largest
        total = "" if epochs is None else f", {400 // chosen.batch_size * epochs:,} in all"
        updates = f"{400 // chosen.batch_size} an epoch{total}"
        assert chosen.reason.endswith(f"; updates: {updates}")


def test_an_optimizer_may_be_wrapped() -> None:
    model, optimizer, data = user_training()
    wrapped = type("Wrapped", (), {"__getattr__": lambda _, name: getattr(optimizer, name)})()
    assert MinibatchSizeOptimizer(initial=2, **FAST).apply(model, wrapped, data).batch_size


def test_wrong_settings_are_named() -> None:
    with pytest.raises(JobError, match="tolerance"):
        MinibatchSizeOptimizer(tolerance=-1)
    with pytest.raises(JobError, match="speed"):
        MinibatchSizeOptimizer(speed=1)
    with pytest.raises(JobError, match="throughput_knee"):
        MinibatchSizeOptimizer("fastest")
    model, _, data = user_training()
    with pytest.raises(JobError, match="LBFGS.*requires closure|requires closure.*LBFGS"):
        MinibatchSizeOptimizer().apply(model, torch.optim.LBFGS(model.parameters()), data)


def test_a_loader_without_a_full_batch_is_an_error() -> None:
    model, optimizer, data = user_training()
    five_samples = torch.utils.data.SubsetRandomSampler(range(5))
    search = MinibatchSizeOptimizer(initial=16, **FAST)
    with pytest.raises(DataError, match="no full batch of 16"):
        search.apply(model, optimizer, data, shuffle=False, sampler=five_samples)
