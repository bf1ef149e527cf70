"""RMSprop warm-up: compared with its formula and with torch's SGD, and resumed."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raytrain_opt.optim.large_batch import PAPER_SCALE, RMSpropWarmup, sgd_fraction

SHAPES = [(3, 4), (5,), (2, 3, 2, 2), ()]
SOON: dict[str, Any] = {
    "center_epochs": 4,
    "period_epochs": 4,
    "steps_per_epoch": 1,
    "rmsprop_scale": 0.02,
}


@pytest.mark.parametrize(
    ("epoch", "fraction"),
    [
        (0.0, 0.009157819444),
        (5.0, 0.067667641618),
        (7.5, 0.183939720586),
        (9.999999, 0.4999998),
        (10.0, 0.5),
        (11.0, 0.7),
        (12.0, 0.9),
        (12.5, 1.0),
        (13.0, 1.0),
        (90.0, 1.0),
    ],
)
def test_sgd_fraction_with_the_papers_center_and_period(epoch: float, fraction: float) -> None:
    assert sgd_fraction(epoch, 10, 5) == pytest.approx(fraction, abs=1e-10)
    assert sgd_fraction(epoch * 16, 160, 80) == pytest.approx(fraction, abs=1e-10)


def test_the_default_scale_gives_the_papers_rate_at_its_batch_size() -> None:
    peak = 0.5 * 0.1 * 32768 / 256
    assert peak * PAPER_SCALE == pytest.approx(3e-4)


def weights(dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in SHAPES]
    return [nn.Parameter(tensor.to(dtype)) for tensor in drawn]


def give_gradients(params: list[Tensor], step: int) -> None:
    random = torch.Generator().manual_seed(1000 + step)
    for param in params:
        drawn = torch.randn(param.shape, generator=random, dtype=torch.float64)
        param.grad = drawn.to(param.dtype)


def reference_step(
    w: list[Tensor], m: list[Tensor], d: list[Tensor], t: int, lr: float, decay: float
) -> None:
    """Apply the paper's formulas literally, one layer at a time; its delta points downhill."""
    x = 2 * (t - 4) / 4
    a_sgd = math.exp(x) / 2 if t < 4 else 0.5 + (t - 4) / 4 if t < 6 else 1.0
    a_rmsprop = (1 - a_sgd) * 0.02
    for i, weight in enumerate(w):
        assert weight.grad is not None
        g = weight.grad + decay * weight.detach()
        m[i] = 0.99 * m[i] + 0.01 * g**2
        d[i] = 0.9 * d[i] - (a_sgd + a_rmsprop / (m[i].sqrt() + 1e-8)) * g
        weight.data = weight.data + lr * d[i]


@pytest.mark.parametrize("decay", [0.0, 1e-2])
def test_every_step_is_the_papers(decay: float) -> None:
    params, reference = weights(), weights()
    optimizer = RMSpropWarmup(params, 0.1, weight_decay=decay, **SOON)
    m, d = ([torch.zeros_like(w.data) for w in reference] for _ in range(2))
    for t in range(10):
        give_gradients(params, t)
        give_gradients(reference, t)
        optimizer.param_groups[0]["lr"] = lr = 0.1 / (1 + t)
        optimizer.step()
        reference_step(reference, m, d, t, lr, decay)
        torch.testing.assert_close(params, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_afterwards_it_is_torchs_momentum_sgd_bit_for_bit(dtype: torch.dtype) -> None:
    params = weights(dtype)
    optimizer = RMSpropWarmup(params, 0.1, weight_decay=1e-2, **SOON)
    for t in range(6):
        give_gradients(params, t)
        optimizer.step()
    sgd_params = [nn.Parameter(w.detach().clone()) for w in params]
    sgd = torch.optim.SGD(sgd_params, lr=0.1, momentum=0.9, weight_decay=1e-2, foreach=True)
    for param, sgd_param in zip(params, sgd_params, strict=True):
        sgd.state[sgd_param]["momentum_buffer"] = optimizer.state[param]["momentum_buffer"].clone()
    for t in range(6, 12):
        give_gradients(params, t)
        give_gradients(sgd_params, t)
        optimizer.step()
        sgd.step()
        for param, sgd_param in zip(params, sgd_params, strict=True):
            assert torch.equal(param, sgd_param)


@pytest.mark.parametrize("stop", [0, 3, 5, 8])
def test_state_dict_resumes_the_transition(stop: int) -> None:
    uninterrupted = weights()
    first = RMSpropWarmup(uninterrupted, 0.1, **SOON)
    for t in range(stop):
        give_gradients(uninterrupted, t)
        first.step()
    resumed = [nn.Parameter(w.detach().clone()) for w in uninterrupted]
    second = RMSpropWarmup(
        resumed, 0.7, center_epochs=50, period_epochs=9, steps_per_epoch=1, rmsprop_scale=3.0
    )
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for t in range(stop, stop + 5):
        for params, optimizer in ((uninterrupted, first), (resumed, second)):
            give_gradients(params, t)
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(uninterrupted, resumed, strict=True))


def test_updates_are_counted_also_without_gradients() -> None:
    late, other = weights()[:2]
    optimizer = RMSpropWarmup([late, other], 0.1, **SOON)
    for step in range(6):
        other.grad = torch.ones_like(other) if step % 2 else None
        optimizer.step()
    late.grad = torch.ones_like(late)
    before = late.detach().clone()
    optimizer.step()
    torch.testing.assert_close(late.detach(), before - 0.1, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("lr", -0.1),
        ("momentum", -0.1),
        ("weight_decay", -1e-4),
        ("rmsprop_scale", -1.0),
        ("center_epochs", -1.0),
        ("period_epochs", 0.0),
        ("lr", math.nan),
        ("center_epochs", math.inf),
    ],
)
def test_values_out_of_range_are_errors_that_name_the_setting(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{setting} must be .*{value!r}"):
        RMSpropWarmup(weights(), **{"lr": 0.1, **SOON, setting: value})
