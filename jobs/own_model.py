"""Your own network and data set: two small functions, named by jobs/own_model.yaml.

Points in a plane lie on three spiral arms; the network classifies the arm. From Python:

    python jobs/own_model.py
    ray job submit --working-dir . -- python jobs/own_model.py
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from raytrain_opt import Job

ARMS = 3


class Spirals(Dataset[tuple[Tensor, int]]):
    """Sample i is a point [2] and the index of its arm.

    Every access adds new noise. It comes from torch's generator, which raytrain-opt seeds for
    each sample and epoch, so that a run can be repeated.
    """

    num_classes = ARMS

    def __init__(self, size: int, noise: float) -> None:
        self.size, self.noise = size, noise

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        arm, turn = index % ARMS, index / self.size
        angle = 2 * math.pi * (turn + arm / ARMS)
        point = (0.2 + turn) * torch.tensor([math.cos(angle), math.sin(angle)])
        return point + self.noise * torch.randn(2), arm


def make_data(train_size: int, test_size: int, noise: float = 0.02) -> tuple[Spirals, Spirals]:
    """Return (train, test); called in every process with `data.args`."""
    return Spirals(train_size, noise), Spirals(test_size, noise)


def make_model(num_classes: int, sample_shape: tuple[int, ...], width: int) -> nn.Module:
    """Return the network; called with `model.args` and the two sizes in the signature."""
    return nn.Sequential(
        nn.Linear(sample_shape[0], width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, num_classes),
    )


def make_job() -> Job:
    """Return the job of jobs/own_model.yaml, with functions instead of their names."""
    return Job(
        name="own-model",
        model={"name": make_model, "args": {"width": 32}},
        data={
            "name": make_data,
            "args": {"train_size": 2000, "test_size": 500},
            "loader_workers": 0,
        },
        epochs=5,
        global_batch_size=64,
        learning_rate={"policy": "stpt", "candidates": [2.0, 1.0, 0.5], "alpha": 0.25},
        workers={"count": 2, "threads": 1},
        slots={"count": 1},
    )


if __name__ == "__main__":
    from raytrain_opt import run  # imported here: every worker imports this file

    result = run(make_job())
    print(f"test accuracy {result.test_metric:.1%}, results in {result.run_dir}")
