"""What the optimizers of this package share: steps in few kernels, and a split of their work."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.sgd import sgd


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a block of memory, in any order of the axes."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def divide_evenly(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Return the indices of the costs in `parts` lists of about equal sums."""
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

    def _check(self, settings: Mapping[str, float]) -> None:
        """Raise ValueError unless all settings are finite and at least 0."""
        for name, value in settings.items():
            if not 0 <= value < math.inf:
                rule = f"{name} must be at least 0 and finite, not {value!r}"
                raise ValueError(f"{type(self).__name__}: {rule}")


def has_fused_kernels(parameter: Tensor) -> bool:
    """Return whether torch has fused updates for a parameter's device and type."""
    device = parameter.device.type
    # On a CPU, those of torch 2.11 leave half-precision parameters as they are.
    return device == "cuda" or (device == "cpu" and parameter.dtype.itemsize >= 4)


def descend(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    group: dict[str, Any],
    weight_decay: float = 0.0,
    *,
    nesterov: bool = False,
    may_fuse: bool = True,
) -> None:
    """Take a step of torch's SGD, with the momentum and the rate of the group."""
    # The fused kernel ignores strides.
    strides = [[tensor.stride() for tensor in tensors] for tensors in (params, grads, buffers)]
    fused = may_fuse and has_fused_kernels(params[0]) and strides[0] == strides[1] == strides[2]
    sgd(
        params,
        grads,
        cast(list[Tensor | None], buffers),
        foreach=not fused,
        fused=fused,
        weight_decay=weight_decay,
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
    )
