"""Update the weights: rate, momentum, weight decay, clipping and the step of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from raytrain_opt.config.updates import MomentumWarmup
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.optim.schedules import Schedule


def scaled_lr(group: Mapping[str, Any], lr: float) -> float:
    """Return the rate of a parameter group when a schedule's rate is `lr`."""
    return lr * float(group.get("lr_multiplier", 1.0))


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of the next update: in each group `lr` times its `lr_multiplier`.

    A rate that is a tensor is filled in place, because captured CUDA graphs read that tensor.
    (torch's ASGD reads the rate at the end of an update: there it counts one update later.)
    """
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(scaled_lr(group, lr))
        else:
            group["lr"] = scaled_lr(group, lr)


def set_momentum(optimizer: Optimizer, warmup: MomentumWarmup | None, epoch: float) -> None:
    """Set the momentum after `epoch` epochs of a warm-up. Raises JobError where there is none."""
    if warmup is None:
        return
    final = optimizer.defaults.get("momentum")
    if final is None:
        rule = f"{type(optimizer).__name__} has no argument momentum; remove it"
        raise JobError([Problem("optimizer.momentum_warmup", rule)])
    risen = min(1.0, epoch / warmup.epochs)
    for group in optimizer.param_groups:
        group["momentum"] = warmup.initial + risen * (final - warmup.initial)


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
    """Clip the complete gradient to this norm, if any, and take a step.

    Does not wait for the device.
    """
    if clip_norm is not None:
        scaler.unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        clip_grad_norm_(parameters, clip_norm, foreach=True)
    scaler.step(optimizer)
    scaler.update()


class ScheduledLR(LRScheduler):
    """Set the rate of every parameter group by a schedule; call `step` after each update.

        schedule = Warmup(0.005, 0.1, 500, "linear", Cosine(0.1, 0.0, 9500), origin=500)
        scheduler = ScheduledLR(optimizer, schedule)

    The rates that the groups had before are ignored. A rate that is a tensor is filled in place.
    `state_dict` holds the step but not the schedule: construct the scheduler with it again. As
    with torch's schedulers, the current rate is restored by the optimizer's `state_dict`.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule) -> None:
        self.schedule = schedule
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of each parameter group at this step; see `parameter_groups`."""
        lr = self.schedule.lr(self.last_epoch)
        return [scaled_lr(group, lr) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the schedule, which may hold a function that torch rejects."""
        return {key: value for key, value in super().state_dict().items() if key != "schedule"}
