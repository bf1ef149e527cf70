"""Python imports this at its start: it adapts torch and the package to the null CUDA device.

Without cuDNN. With NULL_GPU_NUMBERS=1, numbers that would end a run are left out.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder

NUMBERS = {"raytrain_opt.train.evaluation": {"PredictionRecorder.result": lambda *_: None}}


def _adapt(module):
    if module.__name__ == "torch":
        module.backends.cudnn.enabled = False
    for path, replacement in NUMBERS.get(module.__name__, {}).items():
        *parents, name = path.split(".")
        owner = module
        for parent in parents:
            owner = getattr(owner, parent)
        if not hasattr(owner, name):
            raise AttributeError(f"sitecustomize.py: {module.__name__} has no {path}: adapt it")
        setattr(owner, name, replacement)


class _Finder(MetaPathFinder):
    def __init__(self):
        numbers = NUMBERS if os.environ.get("NULL_GPU_NUMBERS") == "1" else {}
        self._names = {"torch", *numbers}

    def find_spec(self, name, path=None, target=None):
        if name not in self._names:
            return None
        self._names.remove(name)  # the call of find_spec below must not come here again
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_adapt(module):
            execute(module)
            _adapt(module)

        spec.loader.exec_module = execute_and_adapt
        return spec


if "NULL_CUDA" in os.environ:
    sys.meta_path.insert(0, _Finder())
