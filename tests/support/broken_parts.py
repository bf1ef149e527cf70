"""Models, data sets and losses as a user gets them wrong; named by job files of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

CLASSES = 3


def points(
    samples: int = 40, label: int | float | None = None, train_only: bool = False
) -> tuple[Any, Any]:
    """(train, test) of points [4] with labels 0 to 2, or sample 0's label is `label`."""
    labels = torch.arange(samples) % CLASSES
    wrong = labels.clone() if label is None else labels.to(torch.tensor(label).dtype)
    if label is not None:
        wrong[0] = label
    x = torch.zeros(samples, 4)
    return TensorDataset(x, wrong), TensorDataset(x, labels if train_only else wrong)


def one_set() -> Any:
    """Forgets the test set."""
    return points()[0]


def no_pairs() -> tuple[Any, Any]:
    """Samples without labels."""
    return TensorDataset(torch.zeros(9, 4)), TensorDataset(torch.zeros(9, 4))


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def stream() -> tuple[Any, Any]:
    """Has no length."""
    return _Stream(), _Stream()


def empty() -> tuple[Any, Any]:
    """Nothing to train on."""
    return points(samples=0)


def raising() -> tuple[Any, Any]:
    """A bug of the user's."""
    raise KeyError("planted bug")


def uneven() -> tuple[Any, Any]:
    """Samples of several sizes."""
    sets = [[(torch.zeros(4 + i), 0) for i in range(9)] for _ in range(2)]
    return sets[0], sets[1]


def linear(sample_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """As many outputs as asked for, whatever the data have."""
    return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(sample_shape).numel(), outputs))


def takes_ten() -> nn.Module:
    """Takes samples [10] only."""
    return nn.Linear(10, CLASSES)


class _TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x


def two_outputs() -> nn.Module:
    """Returns a tuple, as networks with auxiliary heads do."""
    return _TwoOutputs()


def without_parameters() -> nn.Module:
    """Nothing to train."""
    return nn.Flatten()


def no_module() -> Any:
    """Returns something else."""
    return {"weights": 3}


def breaks() -> nn.Module:
    """A bug of the user's."""
    raise ZeroDivisionError("planted bug")


def loss_per_sample(output: Tensor, labels: Tensor) -> Tensor:
    """Forgets the mean."""
    return nn.functional.cross_entropy(output, labels, reduction="none")


def loss_of_images(output: Tensor, labels: Tensor) -> Tensor:
    """Takes outputs of another shape."""
    return output[:, :, 0, 0].mean()


def loss_of_one(output: Tensor) -> Tensor:
    """Takes one argument."""
    return output.mean()


NOT_A_FUNCTION = 3
