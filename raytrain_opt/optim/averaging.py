"""Averaged weights: trained with one set of weights, evaluated with another.

    w_t    weights after update t, counted from 0        a    average        r_t    rate
    a_0 = w_0,   a_t = d_t a_(t-1) + (1 - d_t) w_t
    auto         d_t = 1 - 1 / max(1, h_t),   h_t = (1 + t) / 4 * r_t / highest rate so far
    a number     d_t = min(decay, (1 + t) / (10 + t))

With a number, d_t rises to it, so that the first weights are forgotten in short trainings too (as
in TensorFlow's and timm's EMA). With auto the average covers the last h_t updates, and ends as the
weights themselves (docs/optimizers.md). Schedule-free optimizers average within their own update.

For all, the parameters hold the averaged weights at all times but within a phase of training. The
weights that training continues from are in the optimizer's state, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

# The average during a phase of training, the training's weights otherwise.
_OTHER_WEIGHTS = "other_weights"
# With auto, the part of the updates so far that the average covers at the highest rate.
_COVERED = 0.25


def attach_ema(optimizer: Optimizer, decay: float | Literal["auto"]) -> None:
    """Let the optimizer average its weights after each update."""
    settings = {"ema_decay": decay, "averaged_updates": 0, "highest_lr": 0.0, "train_mode": False}
    for group in optimizer.param_groups:
        group |= settings
    optimizer.register_step_post_hook(_update)


def averages_weights(optimizer: Optimizer) -> bool:
    """Return whether the optimizer averages its weights."""
    return "ema_decay" in optimizer.param_groups[0] or _has_modes(optimizer)


def _has_modes(optimizer: Any) -> bool:
    return all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))


@torch.no_grad()
def use_weights(optimizer: Any, *, training: bool) -> None:
    """Give the parameters the weights to train, or the averaged ones if there is an average."""
    if _has_modes(optimizer):
        # Switching to the average and back would round the weights.
        if training:
            optimizer.train()
            for values, param in _trained(optimizer):
                param.copy_(values.pop(_OTHER_WEIGHTS, param))
            return
        for values, param in _trained(optimizer):
            if _OTHER_WEIGHTS not in values:
                values[_OTHER_WEIGHTS] = param.clone()
        optimizer.eval()
        return
    if optimizer.param_groups[0].get("train_mode", training) == training:
        return
    for group in optimizer.param_groups:
        group["train_mode"] = training
    for values, param in _trained(optimizer):
        if _OTHER_WEIGHTS in values:
            weights = param.clone()
            param.copy_(values[_OTHER_WEIGHTS])
            values[_OTHER_WEIGHTS].copy_(weights)


def _trained(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Yield the parameters that were updated, each after its part of the optimizer's state."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            # Indexing alone would add an entry, which some optimizers take for their own.
            if param in optimizer.state:
                yield optimizer.state[param], param


@torch.no_grad()
def _update(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    # An update that a gradient scaler lets a fused optimizer leave out counts, with weights that
    # did not change: only the device knows of it, and must not be waited for.
    for group in optimizer.param_groups:
        decay = _decay(group)
        group["averaged_updates"] += 1
        averaged = {p for p in group["params"] if _OTHER_WEIGHTS in optimizer.state.get(p, ())}
        trained = [p for p in group["params"] if p.grad is not None or p in averaged]
        for param in trained:
            if param not in averaged:
                optimizer.state[param][_OTHER_WEIGHTS] = param.detach().clone()
        if trained:
            averages = [optimizer.state[param][_OTHER_WEIGHTS] for param in trained]
            torch._foreach_lerp_(averages, trained, 1 - decay)


def _decay(group: dict[str, Any]) -> float:
    """Return the weight of the average so far in this update, and note the group's rate."""
    updates, lr, decay = int(group["averaged_updates"]), float(group["lr"]), group["ema_decay"]
    group["highest_lr"] = highest_lr = max(float(group["highest_lr"]), lr)
    if decay != "auto":
        return float(min(decay, (1 + updates) / (10 + updates)))
    covered = _COVERED * (1 + updates) * (lr / highest_lr if highest_lr else 0.0)
    return 1 - 1 / max(1.0, covered)
