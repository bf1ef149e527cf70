"""Update the weights: rate, weight decay, clipping and the step of an optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of the next update: in each group `lr` times its `lr_multiplier`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * float(group.get("lr_multiplier", 1.0))


def get_weight_decays(optimizer: Optimizer) -> list[float]:
    """Return the weight decay of each parameter group; 0 for an optimizer without it."""
    return [float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups]


def set_weight_decays(optimizer: Optimizer, weight_decays: Sequence[float]) -> None:
    """Set the weight decay of each parameter group; an optimizer without it stays unchanged."""
    for group, weight_decay in zip(optimizer.param_groups, weight_decays, strict=True):
        if "weight_decay" in group:
            group["weight_decay"] = weight_decay


def update_weights(
    optimizer: Optimizer, scaler: torch.amp.GradScaler, clip_norm: float | None
) -> None:
    """Clip the complete gradient to this norm, if any, and take a step, without a wait."""
    if clip_norm is not None:
        scaler.unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        clip_grad_norm_(parameters, clip_norm, foreach=True)
    scaler.step(optimizer)
    scaler.update()
