"""Fast deep-learning training on Ray without hand tuning.

from raytrain_opt import Job, run

result = run(Job(model="resnet8", data="digits", epochs=8, global_batch_size=64))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raytrain_opt import clock as _clock  # first: start-up time counts from here

if TYPE_CHECKING:
    from raytrain_opt.batch_size import find_batch_size
    from raytrain_opt.config.load import load_job
    from raytrain_opt.config.schema import Job
    from raytrain_opt.driver import run
    from raytrain_opt.errors import RaytrainOptError
    from raytrain_opt.minibatch import MinibatchSizeOptimizer
    from raytrain_opt.result import RunResult

__version__ = "0.1.0"
__all__ = [
    "Job",
    "MinibatchSizeOptimizer",
    "RaytrainOptError",
    "RunResult",
    "find_batch_size",
    "load_job",
    "run",
]

_HOMES = {
    "Job": "raytrain_opt.config.schema",
    "MinibatchSizeOptimizer": "raytrain_opt.minibatch",
    "RaytrainOptError": "raytrain_opt.errors",
    "RunResult": "raytrain_opt.result",
    "find_batch_size": "raytrain_opt.batch_size",
    "load_job": "raytrain_opt.config.load",
    "run": "raytrain_opt.driver",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `raytrain-opt validate` must not wait for Ray and torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


del _clock
