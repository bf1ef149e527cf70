"""Data-parallel training on Ray that finds the learning rate and the batch size.

from raytrain_opt import Job, run

result = run(Job(model="resnet8", data="digits", epochs=8, global_batch_size=64))
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from raytrain_opt import clock as _clock  # first: start-up time is measured from here
from raytrain_opt import threads as _threads  # before torch: it sets how its threads wait

if TYPE_CHECKING:
    from raytrain_opt.config.load import load_job as load_job
    from raytrain_opt.config.schema import Job as Job
    from raytrain_opt.driver import run as run
    from raytrain_opt.errors import RaytrainOptError as RaytrainOptError
    from raytrain_opt.execution.batch_size import find_batch_size as find_batch_size
    from raytrain_opt.execution.callbacks import Callback as Callback
    from raytrain_opt.execution.optimizer_finder import find_optimizer as find_optimizer
    from raytrain_opt.execution.result import RunResult as RunResult
    from raytrain_opt.train.batch_size_finder import (
        MinibatchSizeOptimizer as MinibatchSizeOptimizer,
    )
    from raytrain_opt.train.trained_model import TrainedModel as TrainedModel
    from raytrain_opt.train.trained_model import load_model as load_model

__version__ = "0.1.0"

_MODULES = {
    "Callback": "raytrain_opt.execution.callbacks",
    "Job": "raytrain_opt.config.schema",
    "MinibatchSizeOptimizer": "raytrain_opt.train.batch_size_finder",
    "RaytrainOptError": "raytrain_opt.errors",
    "RunResult": "raytrain_opt.execution.result",
    "TrainedModel": "raytrain_opt.train.trained_model",
    "find_batch_size": "raytrain_opt.execution.batch_size",
    "find_optimizer": "raytrain_opt.execution.optimizer_finder",
    "load_job": "raytrain_opt.config.load",
    "load_model": "raytrain_opt.train.trained_model",
    "run": "raytrain_opt.driver",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a name on first use: `raytrain-opt validate` must not wait for Ray and torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(_MODULES[name]), name)


del _clock, _threads
