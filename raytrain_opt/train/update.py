"""The update of the weights, from the complete gradient of a global batch."""

from __future__ import annotations

import torch
from torch.nn.utils import clip_grad_norm_


def update_weights(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, clip_norm: float | None
) -> None:
    """Clip the gradient to this norm, if any, and take a step. Does not wait for the device."""
    if clip_norm is not None:
        scaler.unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        clip_grad_norm_(parameters, clip_norm, foreach=True)
    scaler.step(optimizer)
    scaler.update()
