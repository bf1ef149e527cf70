"""Models, data sets and losses with typical mistakes of users; named by jobs of the tests."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

CLASSES = 3


def points(samples: int = 40) -> tuple[Any, Any]:
    """Return (train, test) of points [4] with labels 0 to 2."""
    points = TensorDataset(torch.zeros(samples, 4), torch.arange(samples) % CLASSES)
    return points, points


def without_classes() -> tuple[Any, Any]:
    """Return lists of samples, which say nothing of their classes."""
    points = [(torch.zeros(4), i % CLASSES) for i in range(40)]
    return points, points


def raising() -> tuple[Any, Any]:
    """Raise an error, as a bug of the user would."""
    raise KeyError("planted bug")


def uneven() -> tuple[Any, Any]:
    """Return samples of several sizes."""
    sets = [[(torch.zeros(4 + i), 0) for i in range(9)] for _ in range(2)]
    return sets[0], sets[1]


def linear(sample_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Return a model with `outputs` outputs, whatever the number of classes."""
    return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(sample_shape).numel(), outputs))


class _TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x


def two_outputs() -> nn.Module:
    """Return a model with a tuple as output, as networks with auxiliary heads have."""
    return _TwoOutputs()


class Fragile(torch.optim.SGD):
    """Sets all weights to `ruin` in its 16th step, if the rate is above `limit`."""

    def __init__(self, params: Any, lr: float, limit: float, ruin: float = math.nan) -> None:
        super().__init__(params, lr)
        self.limit, self.ruin = limit, ruin

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                steps = self.state[weight].setdefault("steps", torch.zeros(()))
                steps += 1
                if steps == 16 and group["lr"] > self.limit:
                    weight.fill_(self.ruin)
        return loss


def breaks() -> nn.Module:
    """Raise an error, as a bug of the user would."""
    raise ZeroDivisionError("planted bug")


def loss_per_sample(output: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each sample instead of the mean."""
    return nn.functional.cross_entropy(output, labels, reduction="none")


def loss_of_one(output: Tensor) -> Tensor:
    """Take one argument only."""
    return output.mean()


NOT_A_FUNCTION = 3
