"""Some of the digits as data for jobs/fine_tune.yaml."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from raytrain_opt.data.in_memory_sets import read_digits


class Digits(Dataset[tuple[Tensor, int]]):
    """Images uint8 [1, 8, 8] of the chosen digits, which are the classes 0, 1, …."""

    def __init__(self, digits: list[int], part: slice) -> None:
        self.classes = [str(digit) for digit in digits]
        images, labels = read_digits()
        chosen = [(x, digits.index(y)) for x, y in zip(images, labels, strict=True) if y in digits]
        self.samples = chosen[part]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        values, label = self.samples[index]
        return torch.from_numpy(values)[None], label


def digits(digits: list[int], train_size: int) -> tuple[Digits, Digits]:
    """Return the first `train_size` images, and the last 200 as the test set."""
    return Digits(digits, slice(train_size)), Digits(digits, slice(-200, None))
