"""LARS on a GPU: the formula, few kernels, no waits. No Ray."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from raytrain_opt.optim.factory import parameter_groups
from raytrain_opt.optim.large_batch import LARS
from tests.support.reference_lars import ReferenceLARS

# The compiler and the debug mode warn about themselves, each version of torch differently.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

SETTINGS = {"weight_decay": 0.01, "trust_coefficient": 0.1}


def network(layers: int = 4, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Convolutions in channels_last, each with its normalization, and a large matrix."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)]
    model = nn.Sequential(*parts, nn.Flatten(), nn.Linear(16 * 8 * 8, 300))
    return model.to("cuda", dtype, memory_format=torch.channels_last)


def optimizer_of(model: nn.Module, make: Any = LARS, lr: Any = 0.5, **settings: Any) -> Any:
    groups = parameter_groups(model, exclude_bias_and_norm=True)
    return make(groups, lr=lr, **{**SETTINGS, **settings})


def fill_gradients(model: nn.Module, seed: int) -> None:
    """In place where there are some already, as a captured graph needs."""
    random = torch.Generator("cuda").manual_seed(seed)
    for param in model.parameters():
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        param.grad.normal_(generator=random)


@pytest.mark.parametrize("changes", [{}, {"momentum": 0.0}])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 0.02)]
)
def test_every_step_is_the_literal_formula(
    dtype: torch.dtype, tolerance: float, changes: dict[str, Any]
) -> None:
    ours, literal = network(dtype=dtype), network(dtype=dtype)
    optimizers = optimizer_of(ours, **changes), optimizer_of(literal, ReferenceLARS, **changes)
    for seed in range(5):
        for model, optimizer in zip((ours, literal), optimizers, strict=True):
            fill_gradients(model, seed)
            optimizer.step()
    for mine, theirs in zip(ours.parameters(), literal.parameters(), strict=True):
        assert (mine - theirs).norm() <= tolerance * theirs.norm()


def test_no_step_waits_for_the_device() -> None:
    model = network()
    optimizer = optimizer_of(model)
    fill_gradients(model, 0)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def kernels_of_a_step(layers: int) -> int:
    model = network(layers)
    optimizer = optimizer_of(model)
    for seed in range(2):
        fill_gradients(model, seed)
        optimizer.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        optimizer.step()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    return sum(event.device_type == on_gpu for event in recorded.events())


def test_more_layers_are_not_more_kernels() -> None:
    """A fused kernel takes at most 48 tensors; these networks have 46 and 16 vectors."""
    assert 0 < kernels_of_a_step(15) == kernels_of_a_step(5) < 30
