"""What adapters share: Datasets with their collate functions, and errors that name the cause."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from raytrain_opt.errors import JobError, Problem


class Collated(Dataset[Any]):
    """A Dataset with the function that makes its batches: (batch, a one for each sample)."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self._collate = dataset, collate
        if hasattr(dataset, "lengths"):
            self.lengths = dataset.lengths

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def collate_fn(self, samples: list[Any]) -> tuple[Any, Tensor]:
        """Return the batch of a list of samples, and a one for each."""
        return self._collate(samples), torch.ones(len(samples))


def collated(dataset: Any, collate: Callable[[list[Any]], Any]) -> Any:
    """Return the Dataset with its collate function; an IterableDataset as it is."""
    return dataset if isinstance(dataset, IterableDataset) else Collated(dataset, collate)


def of_each(value: Any, ones: Tensor) -> Tensor:
    """Return a mean over a batch as the value of each of its samples."""
    return torch.as_tensor(value, device=ones.device).detach().float() * ones


def refuse(names: Iterable[tuple[str, str, str]], source: str) -> None:
    """Raise JobError with all problems, (what, why, what to do), if there are any."""
    if problems := [Problem(name, rule, None, hint) for name, rule, hint in names]:
        raise JobError(problems, source)
