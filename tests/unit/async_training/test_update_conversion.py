"""What the settings of a step become for one of its micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raytrain_opt.async_training.weight_shard import convert, look_ahead, stale_lr_factor

SGD = {"momentum": 0.9, "dampening": 0, "weight_decay": 0.1}
ADAMW = {"betas": (0.9, 0.99), "weight_decay": 0.1, "decoupled_weight_decay": True}
MUON = {"momentum": 0.6, "betas": (0.9, 0.95), "weight_decay": 0.1, "aux": "sgd"}


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (SGD, {"lr_multiplier": 1 / 16}),
        ({**SGD, "lr_multiplier": 2.0}, {"lr_multiplier": 2 / 16}),
        (ADAMW, {"lr_multiplier": 1 / 4, "weight_decay": 0.1 / 4}),
        ({**ADAMW, "decoupled_weight_decay": False}, {"lr_multiplier": 1 / 4}),
        # Of parameters without decay.
        ({**ADAMW, "adapt": False}, {"lr_multiplier": 1 / 4, "weight_decay": 0.1 / 4}),
        ({**SGD, "adapt": True}, {"lr_multiplier": 1 / 4}),  # LARS
        ({**SGD, "adapt": False}, {"lr_multiplier": 1 / 16}),
        ({**MUON, "use_muon": True}, {"lr_multiplier": 1 / 4, "weight_decay": 0.1 / 4}),
        ({**MUON, "use_muon": False}, {"lr_multiplier": 1 / 16}),
    ],
)
def test_settings_of_one_of_sixteen_micro_batches(
    group: dict[str, Any], expected: dict[str, float]
) -> None:
    assert convert(group, 16) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["RMSprop", "Adagrad", "Adadelta", "Adafactor", "SGD", "ASGD"])
def test_optimizers_of_torch_that_normalize_without_betas(name: str) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    [group] = getattr(torch.optim, name)(parameters, weight_decay=0.1).param_groups
    expected = {"lr_multiplier": 1 / 16 if name in ("SGD", "ASGD") else 1 / 4}
    if name == "Adafactor":  # its decay is decoupled
        expected["weight_decay"] = 0.1 / 4
    assert convert(group, 16) == pytest.approx(expected)


@pytest.mark.parametrize(("staleness", "factor"), [(0.0, 1.0), (4.0, 1.0), (16.0, 0.5)])
def test_the_rate_falls_where_gradients_are_staler_than_workers_alone_make_them(
    staleness: float, factor: float
) -> None:
    assert stale_lr_factor(4, staleness) == pytest.approx(factor)


def test_weights_are_ahead_by_what_momentum_alone_does() -> None:
    assert look_ahead(SGD, 3) == pytest.approx(0.9 + 0.81 + 0.729)
    assert look_ahead(ADAMW, 1) == pytest.approx(0.9)
    assert look_ahead({**MUON, "use_muon": False}, 1) == pytest.approx(0.6)
    assert look_ahead({**MUON, "use_muon": False, "aux": "adamw"}, 1) == pytest.approx(0.9)
    assert look_ahead({"momentum": 0.0}, 3) == look_ahead({}, 3) == 0.0
    assert look_ahead({**SGD, "weight_lr_power": 2.0}, 3) == 0.0  # schedule-free
