"""Schedules as torch's schedulers: rates in a loop, resume, rates that are tensors."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from raytrain_opt.optim.schedules import (
    ArcCotangent,
    Constant,
    Cosine,
    Linear,
    MultiStep,
    Polynomial,
    Schedule,
    Warmup,
)
from raytrain_opt.optim.update import ScheduledLR

SCHEDULES: list[Schedule] = [
    Constant(0.3),
    MultiStep(1.0, 0.1, (1, 3)),
    Linear(0.4, 0.1, steps=4),
    Polynomial(1.6, 0.0, steps=4, power=2.0),
    Cosine(2.0, 0.0, steps=4),
    ArcCotangent(0.8, half=3, steepness=1.0),
    Warmup(0.1, 0.5, 4, "linear", Cosine(0.5, 0.0, 2), origin=4),
    Warmup(0.1, 0.5, 2, "constant", MultiStep(0.5, 0.1, (3,)), origin=0),
]


def sgd(lr: Any = 0.7, groups: int = 1) -> torch.optim.Optimizer:
    params = [nn.Parameter(torch.ones(2)) for _ in range(groups)]
    optimizer = torch.optim.SGD(
        [{"params": [p], "lr": lr * (i + 1)} for i, p in enumerate(params)]
    )
    for param in params:
        param.grad = torch.zeros_like(param)
    return optimizer


def rates_of_loop(
    optimizer: torch.optim.Optimizer, scheduler: lr_scheduler.LRScheduler, steps: int
) -> list[list[float]]:
    """Return the rates of all groups at each update of an ordinary training loop."""
    rates = []
    for _ in range(steps):
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        assert [float(lr) for lr in scheduler.get_last_lr()] == rates[-1]
        optimizer.step()
        scheduler.step()
    return rates


# pytest turns every warning into an error, also torch's about the order of the calls.
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
def test_updates_use_the_schedules_rates(schedule: Schedule) -> None:
    optimizer = sgd(groups=2)
    rates = rates_of_loop(optimizer, ScheduledLR(optimizer, schedule), 8)
    assert rates == [[schedule.lr(step)] * 2 for step in range(8)]


@pytest.mark.parametrize("stop", [0, 1, 3, 6])
def test_state_dict_resumes_at_the_same_step(stop: int) -> None:
    schedule = Warmup(0.1, 0.5, 4, "linear", ArcCotangent(0.5, 5, 1.0, lambda x: x**3), origin=0)
    first = sgd()
    scheduler = ScheduledLR(first, schedule)
    rates_of_loop(first, scheduler, stop)
    file = io.BytesIO()
    torch.save({"scheduler": scheduler.state_dict(), "optimizer": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = sgd(0.01)
    resumed = ScheduledLR(second, schedule)
    resumed.load_state_dict(saved["scheduler"])
    second.load_state_dict(saved["optimizer"])
    rates = rates_of_loop(second, resumed, 5)
    assert rates == [[schedule.lr(step)] for step in range(stop, stop + 5)]


def test_a_rate_that_is_a_tensor_is_filled_in_place() -> None:
    schedule = Linear(0.5, 0.0, steps=4)
    lr = torch.tensor(9.0)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=lr)
    rates = rates_of_loop(optimizer, ScheduledLR(optimizer, schedule), 3)
    assert rates == [[0.5], [0.375], [0.25]]
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.125


def test_it_can_be_chained_and_sequenced_with_torchs_schedulers() -> None:
    optimizer = sgd()
    scheduled = ScheduledLR(optimizer, Linear(0.4, 0.0, steps=4))
    constant = lr_scheduler.ConstantLR(optimizer, factor=1.0)
    both = lr_scheduler.ChainedScheduler([constant, scheduled], optimizer)
    assert rates_of_loop(optimizer, both, 3) == [[0.4], [pytest.approx(0.3)], [0.2]]

    optimizer = sgd()
    parts = [ScheduledLR(optimizer, Constant(0.1)), ScheduledLR(optimizer, Linear(0.4, 0.0, 4))]
    sequence = lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])
    rates = [rate for (rate,) in rates_of_loop(optimizer, sequence, 4)]
    assert rates == pytest.approx([0.1, 0.1, 0.4, 0.3])
