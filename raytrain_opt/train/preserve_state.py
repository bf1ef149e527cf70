"""Undo training: weights, buffers, optimizer, scaler, gradients, modes and random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from raytrain_opt.random_state import preserve_modes, preserve_random_state
from raytrain_opt.train.state import capture, restore


@contextmanager
def preserve_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    device: torch.device,
) -> Iterator[None]:
    """Make everything bit-identical on exit, whatever was trained inside.

    The copy is kept in CPU memory, so that it takes none of the device's.
    """
    state = capture(model, optimizer, scaler, copy=True)
    gradients = [parameter.grad for parameter in model.parameters()]
    with preserve_random_state(device), preserve_modes(model):
        try:
            yield
        finally:
            restore(state, model, optimizer, scaler)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
