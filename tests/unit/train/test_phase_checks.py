"""Every parameter that gets a gradient is trained, or the run ends with its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from raytrain_opt.errors import JobError
from raytrain_opt.results import Steps
from tests.unit.train.test_learner import LRS, all_of, learner


class Net(nn.Module):
    """A layer and, as `kind` says, parameters that nobody or somebody trains."""

    def __init__(self, num_classes: int, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.layer, self.norm = nn.Linear(16, num_classes), nn.BatchNorm1d(num_classes)
        if kind == "hidden":
            self.others = [nn.Parameter(torch.ones(num_classes))]
        if kind == "tied":
            self.first = self.second = nn.Linear(num_classes, num_classes)
        if kind == "zero":
            self.unused = nn.Parameter(torch.ones(num_classes))

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(x.flatten(1))
        if self.kind == "hidden":
            return output * self.others[0]
        if self.kind == "lazy" and self.training:
            self.scale = nn.Parameter(torch.ones(output.shape[1]))
        if self.kind == "replaced" and self.training:
            self.layer.bias = nn.Parameter(self.layer.bias.detach())
        if self.kind == "zero":
            return output + 0 * self.unused
        return self.second(self.first(output)) if self.kind == "tied" else self.norm(output)


class Partial(torch.optim.SGD):
    """SGD that takes only the first parameter of each group."""

    def __init__(self, params: Any, lr: float) -> None:
        groups = [{**group, "params": group["params"][:1]} for group in params]
        super().__init__(groups, lr)


class Lazy(torch.optim.SGD):
    """SGD by `data`, as older optimizers, that takes all parameters and trains no biases."""

    biases = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and (p.dim() > 1 or self.biases):
                    p.data = p.data - group["lr"] * p.grad


class OldSGD(Lazy):
    biases = True


class LearnedLoss:
    """A task with a parameter of its own."""

    def __init__(self) -> None:
        self.scale = nn.Parameter(torch.ones(()))

    def training_loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.scale * functional.cross_entropy(model(batch[0]), batch[1])

    def validation_metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": functional.cross_entropy(model(batch[0]), batch[1], reduction="none")}


def make(kind: str) -> Any:
    return {"name": Net, "args": {"kind": kind}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": Net, "optimizer": {"name": Partial}}, r"Partial does not train .*layer\.bias"),
        ({"model": Net, "optimizer": {"name": Lazy}}, r"Lazy does not change .*norm\.bias"),
        ({"model": make("lazy")}, r"SGD does not train parameters: 1 \(scale\)"),
        ({"model": make("replaced")}, r"does not train parameters: 1 \(layer\.bias\)"),
        ({"model": make("hidden")}, r"parameters outside the network; shapes: 1 \(\[7\]\)"),
        ({"model": Net, "task": {"name": LearnedLoss}}, r"outside the network; shapes: 1"),
    ],
)
def test_parameters_that_are_not_trained_are_an_error(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        learner(**changes).train(1, Steps(0, LRS), all_of(1))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": Net, "optimizer": {"name": OldSGD}},  # a bias before BatchNorm does not move
        {"model": make("tied")},
        {"model": make("zero"), "optimizer": {"name": OldSGD}},
        {"model": {"name": Net, "freeze": ["layer.*"]}, "optimizer": {"name": OldSGD}},
    ],
    ids=["old", "tied", "zero", "frozen"],
)
def test_trained_or_fixed_parameters_are_none(changes: dict[str, Any]) -> None:
    trained = learner(**changes)
    assert trained.train(1, Steps(0, LRS), all_of(1)).steps == len(LRS)
