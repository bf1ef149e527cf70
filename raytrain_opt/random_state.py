"""Seed random numbers, and leave them and layer modes as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch
from torch import nn


def seed_torch(text: str, device: torch.device) -> None:
    """Seed torch's generators of the CPU and the device from a text, alike in every process.

    `hash` differs between processes, and `torch.manual_seed` also seeds devices that are not used,
    in 0.3 ms.
    """
    seed = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed_all(seed)


def seed_all(seed: int) -> None:
    """Seed the generators that a user's code may draw from: torch's on CPU, numpy's, Python's."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


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
