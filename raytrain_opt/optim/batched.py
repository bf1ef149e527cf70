"""What the optimizers of this package share: steps in few kernels, and a split of their work."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer


def split_evenly(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Return the indices of the costs in `parts` lists of about equal sums.

    The largest cost comes first, each goes to the part with the smallest sum so far.
    """
    sums, indices = [0] * parts, [list[int]() for _ in range(parts)]
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        part = sums.index(min(sums))
        sums[part] += costs[index]
        indices[part].append(index)
    return [sorted(part) for part in indices]


class BatchedOptimizer(Optimizer, ABC):
    """Base of optimizers that update the parameters of one device and type together."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return the loss of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.is_sparse or p.grad.is_complex() for p in params):
                raise RuntimeError(f"{type(self).__name__} needs dense real gradients")
            if group["params"]:
                self._update_group(group, params)
        return loss

    @abstractmethod
    def _update_group(self, group: dict[str, Any], params: list[Any]) -> None:
        """Update the parameters of a group that have a gradient."""

    @staticmethod
    def _batches(params: list[Any]) -> Iterator[list[Any]]:
        """Yield the parameters by device and type."""
        if params:
            for (batch,), _ in Optimizer._group_tensors_by_device_and_dtype([params]).values():
                yield cast(list[Any], batch)

    def _buffers(self, name: str, params: Sequence[Tensor]) -> list[Tensor]:
        """Return these tensors of the parameters' states, 0 at first."""
        for param in params:
            if name not in self.state[param]:
                self.state[param][name] = torch.zeros_like(param)
        return [self.state[param][name] for param in params]

    def _check(self, name: str, value: float, *, positive: bool = False) -> None:
        """Raise ValueError unless the setting `name` is in its range."""
        if not (0 < value < math.inf if positive else 0 <= value < math.inf):
            least = "above 0" if positive else "at least 0"
            owner = type(self).__name__
            raise ValueError(f"{owner}: {name} must be {least} and finite, not {value!r}")
