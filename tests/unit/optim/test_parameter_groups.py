"""Parameters excluded from weight decay and trust ratio; none is lost or duplicated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raytrain_opt.optim.factory import parameter_groups


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


def test_a_shared_parameter_is_listed_once() -> None:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model[1].weight = model[0].weight
    assert names(model) == [["0.weight"], ["0.bias", "1.bias"]]


def test_frozen_parameters_are_included() -> None:
    model = convolutional()
    model.requires_grad_(False)
    assert sum(map(len, names(model))) == len(list(model.parameters()))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.position = nn.Parameter(torch.zeros(1, 4, 8))
        self.grid = nn.Parameter(torch.zeros(1, 8, 2, 2))  # with a single row
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm = nn.LayerNorm((4, 8))
        self.head = nn.Linear(8, 9)


def muon_names(model: nn.Module) -> list[str]:
    by_id = {id(param): name for name, param in model.named_parameters()}
    groups = parameter_groups(model, exclude_bias_and_norm=True, use_muon=True)
    assert sum(len(group["params"]) for group in groups) == len(by_id)
    return [by_id[id(p)] for group in groups if group["use_muon"] for p in group["params"]]


def test_muon_takes_matrices_without_embeddings_normalization_and_single_rows() -> None:
    attention = ["attention.in_proj_weight", "attention.out_proj.weight"]
    assert muon_names(Transformer()) == ["position", *attention, "head.weight"]
    assert muon_names(nn.Conv1d(4, 1, 3, bias=False)) == []
    assert muon_names(convolutional()) == ["0.weight", "3.weight"]


def test_the_first_pattern_that_matches_sets_the_multiplier() -> None:
    groups = parameter_groups(
        convolutional(), exclude_bias_and_norm=True, lr_multipliers={"*.bias": 2.0, "0.*": 3.0}
    )
    sizes = [(len(g["params"]), g.get("lr_multiplier"), "adapt" in g) for g in groups]
    assert sizes == [(1, 3.0, False), (1, None, False), (2, 2.0, True), (1, None, True)]
