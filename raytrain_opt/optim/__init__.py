"""Optimizers, schedules and scaling rules, each usable on its own in any training loop.

    from raytrain_opt.optim import LARS
    from raytrain_opt.optim.factory import parameter_groups

    groups = parameter_groups(model, exclude_bias_and_norm=True)
    optimizer = LARS(groups, lr=10.0, weight_decay=5e-5)

Start with `schedules` (learning rates as functions of the step, and for another batch size) and
`epoch_steps` (updates of each epoch), which are free of torch; then `large_batch` (LARS,
RMSpropWarmup), `muon` and `averaging`. `factory` builds what the `optimizer` section of a job
names, with its parameter groups; `update` sets rate, momentum and weight decay, clips and takes
the step. May import config and errors.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raytrain_opt.optim.schedules import (
    ArcCotangent,
    Constant,
    Cosine,
    Linear,
    MultiStep,
    Polynomial,
    Warmup,
    scale_lr,
)

if TYPE_CHECKING:
    from raytrain_opt.optim.large_batch import LARS, RMSpropWarmup
    from raytrain_opt.optim.muon import Muon
    from raytrain_opt.optim.update import ScheduledLR

__all__ = [
    "LARS",
    "ArcCotangent",
    "Constant",
    "Cosine",
    "Linear",
    "MultiStep",
    "Muon",
    "Polynomial",
    "RMSpropWarmup",
    "ScheduledLR",
    "Warmup",
    "scale_lr",
]

# Imported on first use: these need torch, which takes seconds to import, while `search` and the
# command line import schedules and steps from this package without it.
_NEED_TORCH = {
    "LARS": "large_batch",
    "Muon": "muon",
    "RMSpropWarmup": "large_batch",
    "ScheduledLR": "update",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
