"""Put a training back as it was: weights, buffers, optimiser, scaler, gradients, modes, RNG."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from raytrain_opt.train.state import capture, restore


@contextmanager
def untouched(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    device: torch.device,
) -> Iterator[None]:
    """Whatever is trained inside, afterwards all of it is bit-identical to before.

    The copy is kept in host memory, so that it takes none of the device's.
    """
    state = capture(model, optimizer, scaler, copy=True)
    gradients = [parameter.grad for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    cuda = [device] if device.type == "cuda" else []
    pythons, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=cuda):
        try:
            yield
        finally:
            random.setstate(pythons)
            np.random.set_state(numpys)
            restore(state, model, optimizer, scaler)
            for module, mode in zip(model.modules(), modes, strict=True):
                module.training = mode
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
