"""Parameters excluded from weight decay and trust ratio; none is lost or duplicated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raytrain_opt.optim.parameter_groups import parameter_groups


def names(model: nn.Module, exclude: bool = True) -> list[list[str]]:
    name_by_id = {id(param): name for name, param in model.named_parameters()}
    groups = parameter_groups(model, exclude_bias_and_norm=exclude)
    return [[name_by_id[id(param)] for param in group["params"]] for group in groups]


def settings(model: nn.Module) -> list[dict[str, Any]]:
    groups = parameter_groups(model, exclude_bias_and_norm=True)
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 5, bias=False)
    )


def test_biases_and_normalization_form_the_second_group() -> None:
    assert names(convolutional()) == [["0.weight", "3.weight"], ["0.bias", "1.weight", "1.bias"]]
    assert settings(convolutional()) == [{}, {"weight_decay": 0.0, "adapt": False}]


def test_without_exclusion_all_are_in_one_group_in_order() -> None:
    model = convolutional()
    assert names(model, exclude=False) == [[name for name, _ in model.named_parameters()]]


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm((2, 3)),
        nn.RMSNorm((2, 3)),
        nn.GroupNorm(2, 4),
        nn.BatchNorm1d(4),
        nn.BatchNorm3d(4),
        nn.SyncBatchNorm(4),
        nn.InstanceNorm2d(4, affine=True),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_every_normalization_layer_is_excluded(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(3, 4, bias=False), norm)
    expected = [f"1.{name}" for name, _ in norm.named_parameters()]
    assert names(model) == [["0.weight"], expected]


def test_no_group_is_empty() -> None:
    assert names(nn.Linear(3, 4, bias=False)) == [["weight"]]
    assert names(nn.BatchNorm2d(4)) == [["weight", "bias"]]
    assert settings(nn.BatchNorm2d(4)) == [{"weight_decay": 0.0, "adapt": False}]
    assert names(nn.ReLU()) == names(nn.ReLU(), exclude=False) == []


def test_a_shared_parameter_is_listed_once() -> None:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model[1].weight = model[0].weight
    assert names(model) == [["0.weight"], ["0.bias", "1.bias"]]


def test_frozen_parameters_are_included() -> None:
    model = convolutional()
    model.requires_grad_(False)
    assert sum(map(len, names(model))) == len(list(model.parameters()))


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_torchs_optimizers_do_not_decay_excluded_parameters(optimizer_class: Any) -> None:
    model = convolutional()
    before = {name: param.clone() for name, param in model.named_parameters()}
    groups = parameter_groups(model, exclude_bias_and_norm=True)
    optimizer = optimizer_class(groups, lr=0.5, weight_decay=0.5)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for name, param in model.named_parameters():
        decays = name in ("0.weight", "3.weight")
        torch.testing.assert_close(param, before[name] * (0.75 if decays else 1.0))
