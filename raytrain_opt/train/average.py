"""The mean of several states of one training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from raytrain_opt.train.state import HostState, HostTensor


def averaged(states: Sequence[HostState]) -> HostState:
    """Weights, BatchNorm statistics and the optimiser's tensors: the mean, each element in
    float64 and then rounded to its own type. Integers (counts of steps) and plain values are
    those of the first state.

    All states have the same tensors, as those of one model and one optimiser have.
    """
    first = states[0]
    mean = {name: _mean([state.tensors[name] for state in states]) for name in first.tensors}
    return HostState(mean, first.plain)


def _mean(tensors: Sequence[HostTensor]) -> HostTensor:
    first, values = tensors[0], tensors[0].tensor()
    if not values.is_floating_point():
        return first
    total = torch.zeros_like(values, dtype=torch.float64)
    for tensor in tensors:
        total += tensor.tensor()
    mean = (total / len(tensors)).to(values.dtype)
    return replace(first, data=HostTensor.of(mean, copy=False).data)
