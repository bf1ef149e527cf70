"""check_output explains a model that does not match the data, and preserves the model."""

from __future__ import annotations

import random
from copy import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raytrain_opt.config.schema import ModelSection
from raytrain_opt.errors import DataError
from raytrain_opt.models import build_model, check_output
from raytrain_opt.models.factory import preserve_model

SHAPE = (1, 8, 8)
SAMPLES = torch.zeros(2, *SHAPE)


def small_cnn(num_classes: int = 10) -> nn.Module:
    section = ModelSection(name="small_cnn", args={"width": 4})
    return build_model(section, num_classes=num_classes, sample_shape=SHAPE, seed=0)


class TwoOutputs(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (small_cnn(1000), r"\[2, 10\].* is \[2, 1000\].*model\.args.*data\.num_classes"),
        (nn.Flatten(0), r"is \[128\]"),
        (TwoOutputs(), "is tuple"),
        (nn.Linear(3, 10), r"cannot process .*\[2, 1, 8, 8\].*RuntimeError.*model\.args"),
    ],
)
def test_a_wrong_output_is_named_with_the_fields_to_change(model: nn.Module, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_output(model, SAMPLES, 10)


class Changes(nn.Module):
    """A network that a call changes in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.grown = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.register_buffer("buffer", torch.zeros(2))
        self.plain, self.flag, self.list = torch.zeros(2), False, [torch.zeros(2)]
        self.nested: dict[str, Any] = {"a": [1], "b": {2}}

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.data.add_(1)
            self.grown.data = torch.ones(3)
        self.buffer, self.flag = torch.ones(5), True
        self.plain += 1
        self.list[0] += 1
        self.list.append(x)
        self.nested["a"].append(2)
        self.nested["c"] = random.random() + np.random.rand()
        self.late, self.extra = nn.Linear(1, 1), nn.Parameter(torch.ones(1))
        self.register_buffer("new", torch.rand(1))
        del self.weight
        return x


def test_everything_that_a_call_changes_is_restored() -> None:
    model, task = Changes(), Changes()
    task.network = Changes()
    for network in (model, task, task.network):
        before = {**network.state_dict()}, copy(vars(network))
        weight, containers = network.weight, (network.list, network.nested)
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        with preserve_model(model, torch.device("cpu"), task):
            network(torch.ones(1))
        assert network.weight is weight
        assert network.weight.tolist() == network.grown.tolist() == [1, 1]
        assert network.buffer.tolist() == network.plain.tolist() == [0, 0]
        assert network.state_dict().keys() == before[0].keys()
        assert vars(network).keys() == before[1].keys()
        assert (network.list, network.nested) == containers
        assert (network.flag, len(network.list), network.nested) == (
            False,
            1,
            {"a": [1], "b": {2}},
        )
        assert network.list[0].tolist() == [0, 0]
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert np.random.get_state()[1].tolist() == states[2]
