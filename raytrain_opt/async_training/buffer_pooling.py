"""Combine buffers of unequal fractions p_w of an epoch as `train.batch_norm` does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from raytrain_opt.results import BufferUpdates
from raytrain_opt.train.state import PackedTensor, TrainingState

_MEAN, _VAR, _COUNT = "running_mean", "running_var", "num_batches_tracked"

Value = npt.NDArray[np.float64]
Values = dict[str, Value]


def pool_buffers(workers: Sequence[BufferUpdates]) -> Values:
    """Return the combined floating-point buffers by name; none if nobody computed anything."""
    active = [worker for worker in workers if worker.batches]
    if not active:
        return {}
    total = sum(worker.batches for worker in active)
    fractions = [worker.batches / total for worker in active]
    mean = {
        name: np.tensordot(fractions, [w.values[name] for w in active], 1)
        for name in active[0].values
    }
    layers = {layer for worker in active for layer in worker.sampling_noise}
    return mean | {
        f"{layer}.{_VAR}": _variance(layer, fractions, active, mean) for layer in layers
    }


def _variance(
    layer: str, fractions: Sequence[float], workers: Sequence[BufferUpdates], mean: Values
) -> Value:
    name = f"{layer}.{_MEAN}"
    noise = [worker.sampling_noise.get(layer, 0.0) for worker in workers]
    weights = [p * (1 - s) for p, s in zip(fractions, noise, strict=True)]
    within = np.tensordot(weights, [worker.values[f"{layer}.{_VAR}"] for worker in workers], 1)
    between = np.tensordot(fractions, [(w.values[name] - mean[name]) ** 2 for w in workers], 1)
    bias = sum(p * p * s for p, s in zip(fractions, noise, strict=True))
    variance: Value = (within + between) / (1 - bias)
    return variance


def advance_buffers(
    start: TrainingState, workers: Sequence[BufferUpdates], updates: int
) -> dict[str, PackedTensor]:
    """Return the model's buffers by name, their counts of batches advanced by the `updates`."""
    values = pool_buffers(workers)
    counts = {f"{layer}.{_COUNT}" for worker in workers for layer in worker.sampling_noise}
    buffers = {}
    for key, packed in start.tensors.items():
        name, before = key.removeprefix("model."), packed.tensor()
        if name in values:
            after = torch.from_numpy(values[name]).to(before.dtype)
            buffers[name] = PackedTensor.from_tensor(after.reshape(before.shape), copy=True)
        elif name in counts:
            buffers[name] = PackedTensor.from_tensor(before + updates, copy=True)
    return buffers
