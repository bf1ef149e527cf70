"""Context managers that leave random numbers and layer modes as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def preserve_random_state(device: torch.device | None = None) -> Iterator[None]:
    """Restore the generators of Python, NumPy and torch on exit, and that of `device` if a GPU."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    gpus = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def preserve_modes(model: nn.Module) -> Iterator[None]:
    """Restore the training or evaluation mode of each layer on exit."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
