"""Averages of several states of one training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from raytrain_opt.train.state import PackedTensor, TrainingState


def average_states(states: Sequence[TrainingState]) -> TrainingState:
    """Average the weights, BatchNorm statistics and optimizer tensors of several states.

    Means are computed in float64 and rounded to the tensor's dtype. Integer tensors (counts of
    steps) and plain values are copied from the first state. All states must have the same
    tensors: those of one model and one optimizer.
    """
    first = states[0]
    tensors = {name: _average([s.tensors[name] for s in states]) for name in first.tensors}
    return TrainingState(tensors, first.plain)


def _average(tensors: Sequence[PackedTensor]) -> PackedTensor:
    first, values = tensors[0], tensors[0].tensor()
    if not values.is_floating_point():
        return first
    total = torch.zeros_like(values, dtype=torch.float64)
    for tensor in tensors:
        total += tensor.tensor()
    mean = (total / len(tensors)).to(values.dtype)
    return replace(first, data=PackedTensor.from_tensor(mean, copy=False).data)
