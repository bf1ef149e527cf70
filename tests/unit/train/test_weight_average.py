"""Averages of states of one training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raytrain_opt.train.state import TrainingState, capture, restore
from raytrain_opt.train.weight_average import average_states


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    return layers.to(memory_format=torch.channels_last)


def trained(lr: float, optimizer_class: type[torch.optim.Optimizer]) -> TrainingState:
    """After two steps from the same weights on the same batch."""
    model = network()
    optimizer = optimizer_class(model.parameters(), lr=lr)  # type: ignore[call-arg]
    x = torch.linspace(-1, 1, 8 * 48).reshape(8, 3, 4, 4)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return capture(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), copy=True)


def tensors(state: TrainingState) -> dict[str, torch.Tensor]:
    return {name: value.tensor() for name, value in state.tensors.items()}


def test_every_float_is_the_mean_and_every_count_the_first_ones() -> None:
    first, second = trained(0.1, torch.optim.AdamW), trained(0.3, torch.optim.AdamW)
    mean = tensors(average_states([first, second]))
    a, b = tensors(first), tensors(second)
    assert mean.keys() == a.keys()
    for name, value in mean.items():
        if value.is_floating_point():
            expected = (a[name].double() + b[name].double()) / 2
            assert torch.equal(value, expected.to(value.dtype)), name
        else:
            assert torch.equal(value, a[name]), name
    assert any(not torch.equal(a[name], b[name]) for name in a)
    assert mean["model.1.num_batches_tracked"] == 2


def test_the_mean_of_equal_states_is_that_state() -> None:
    state = trained(0.1, torch.optim.AdamW)
    assert average_states([state, state, state]).digest() == state.digest()


def test_training_continues_from_an_average() -> None:
    mean = average_states([trained(lr, torch.optim.AdamW) for lr in (0.1, 0.2, 0.3)])
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    restore(mean, model, optimizer, torch.amp.GradScaler("cpu", enabled=False))
    expected = tensors(mean)["model.0.weight"]
    assert torch.equal(model.state_dict()["0.weight"], expected)
    assert len(optimizer.state) == len(list(model.parameters()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_mean_is_rounded_once(dtype: torch.dtype) -> None:
    def state_of(value: float) -> TrainingState:
        model = nn.Linear(1, 1, bias=False).to(dtype)
        nn.init.constant_(model.weight, value)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return capture(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), copy=True)

    values = (1.0, 1.125, 1.25, 300.0)
    mean = tensors(average_states([state_of(value) for value in values]))["model.weight"]
    assert mean.item() == torch.tensor(sum(values) / 4, dtype=dtype).item()
