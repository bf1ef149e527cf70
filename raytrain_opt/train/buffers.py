"""Buffers of workers that computed unequal parts of an epoch, made one.

As `train.batchnorm` puts them together for workers that take each step together, but with weights
p_w, the worker's part of all batches: of running means m_w and variances v_w, with s_w the part of
v by which a worker's mean strays by chance,

    m = sum(p_w m_w)
    B = sum(p_w (m_w - m)^2)
    v = (sum(p_w (1 - s_w) v_w) + B) / (1 - sum(p_w^2 s_w))

which is the formula there when all p_w = 1 / W and all s_w are equal, and unbiased for the same
reason. Other floating-point buffers become their mean with the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from raytrain_opt.train.batchnorm import batches_seen, strayed_by_chance
from raytrain_opt.train.state import HostState, HostTensor
from raytrain_opt.train.totals import Buffers

_MEAN, _VAR, _COUNT = "running_mean", "running_var", "num_batches_tracked"

Value = npt.NDArray[np.float64]
Values = dict[str, Value]


def buffers_of(
    model: nn.Module,
    batch_size: int,
    positions: Mapping[str, float],
    since: Mapping[str, int],
    batches: int,
) -> Buffers:
    """After `batches` forward passes; the others are those of `strayed_by_chance`."""
    seen = batches_seen(model)
    by_chance = strayed_by_chance(model, batch_size, positions, since)
    values = {
        name: buffer.detach().double().cpu().numpy().copy()
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point()
    }
    moved = {name: s for name, s in by_chance.items() if seen[name] > since[name]}
    return Buffers(batches, values, moved)


def pooled(workers: Sequence[Buffers]) -> Values:
    """The floating-point buffers of all, by name; nothing where nobody computed anything."""
    at_work = [worker for worker in workers if worker.batches]
    if not at_work:
        return {}
    whole = sum(worker.batches for worker in at_work)
    parts = [worker.batches / whole for worker in at_work]
    mean = {
        name: _weighted(parts, [w.values[name] for w in at_work]) for name in at_work[0].values
    }
    layers = {layer for worker in at_work for layer in worker.by_chance}
    return mean | {f"{layer}.{_VAR}": _variance(layer, parts, at_work, mean) for layer in layers}


def _variance(
    layer: str, parts: Sequence[float], workers: Sequence[Buffers], mean: Values
) -> Value:
    name = f"{layer}.{_MEAN}"
    chance = [worker.by_chance.get(layer, 0.0) for worker in workers]
    inside = [p * (1 - s) for p, s in zip(parts, chance, strict=True)]
    within = _weighted(inside, [worker.values[f"{layer}.{_VAR}"] for worker in workers])
    between = _weighted(parts, [(worker.values[name] - mean[name]) ** 2 for worker in workers])
    return (within + between) / (1 - sum(p * p * s for p, s in zip(parts, chance, strict=True)))


def _weighted(weights: Sequence[float], values: Sequence[Value]) -> Value:
    terms = [weight * value for weight, value in zip(weights, values, strict=True)]
    total: Value = np.sum(terms, axis=0, dtype=np.float64)
    return total


def moved_on(start: HostState, workers: Sequence[Buffers], updates: int) -> dict[str, HostTensor]:
    """The model's buffers after a phase of so many updates that began at `start`, by their names.

    BatchNorm's counts of batches move on by the updates, as if all workers had taken each step.
    """
    values = pooled(workers)
    counted = {f"{layer}.{_COUNT}" for worker in workers for layer in worker.by_chance}
    found = {}
    for full, before in start.tensors.items():
        name = full.removeprefix("model.")
        if name in values:
            now = torch.from_numpy(values[name]).to(before.tensor().dtype)
            found[name] = HostTensor.of(now.reshape(before.tensor().shape), copy=True)
        elif name in counted:
            found[name] = HostTensor.of(before.tensor() + updates, copy=True)
    return found
