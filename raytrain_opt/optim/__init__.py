"""Optimisers, schedules and scaling rules, each usable on its own in any training loop.

from raytrain_opt.optim import LARS
from raytrain_opt.optim.parameter_groups import parameter_groups

optimizer = LARS(parameter_groups(model, exclude_bias_and_norm=True), lr=10.0, weight_decay=5e-5)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytrain_opt.optim.lars import LARS
    from raytrain_opt.optim.lr_scheduler import ScheduledLR
    from raytrain_opt.optim.rmsprop_warmup import RMSpropWarmup
    from raytrain_opt.optim.scaling import linear_scaling, sqrt_scaling
    from raytrain_opt.optim.schedules import (
        ArcCotangent,
        Constant,
        Cosine,
        Linear,
        MultiStep,
        Polynomial,
        Step,
        Warmup,
    )

__all__ = [
    "LARS",
    "ArcCotangent",
    "Constant",
    "Cosine",
    "Linear",
    "MultiStep",
    "Polynomial",
    "RMSpropWarmup",
    "ScheduledLR",
    "Step",
    "Warmup",
    "linear_scaling",
    "sqrt_scaling",
]

_HOMES = {
    "LARS": "lars",
    "RMSpropWarmup": "rmsprop_warmup",
    "ScheduledLR": "lr_scheduler",
    "linear_scaling": "scaling",
    "sqrt_scaling": "scaling",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the schedules serve code that must not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'schedules')}"), name)
