"""The names of models, and the functions of the built-in ones."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

# Model name -> module of raytrain_opt.models. Text, so that listing and checking names does not
# import torch.
_BUILTIN_MODULES = {
    "cifar_resnet18": "resnet",
    "cifar_resnet45": "resnet",
    "cifar_resnet50": "resnet",
    "resnet8": "resnet",
    "resnet45": "resnet",
    "small_cnn": "small_cnn",
    "vgg16_bn": "vgg",
    "vgg16_one_bn": "vgg",
}

# googlenet and inception_v3 return two outputs in training unless their auxiliary head is off
# (the training loop takes one), and warn about a slow initialization unless it is requested.
_SINGLE_OUTPUT = {"aux_logits": False, "init_weights": True}
TORCHVISION_DEFAULTS: dict[str, dict[str, Any]] = {
    "googlenet": _SINGLE_OUTPUT,
    "inception_v3": _SINGLE_OUTPUT,
}


def model_names() -> list[str]:
    """Return the names of the built-in models, sorted."""
    return sorted(_BUILTIN_MODULES)


def torchvision_names() -> list[str]:
    """Return torchvision's classification models without built-in names, sorted; imports it."""
    from torchvision import models

    return sorted(set(models.list_models(module=models)) - set(_BUILTIN_MODULES))


def model_function(name: str) -> Callable[..., Any]:
    """Return the function that constructs a built-in model. Imports torch."""
    module = importlib.import_module(f"raytrain_opt.models.{_BUILTIN_MODULES[name]}")
    function: Callable[..., Any] = getattr(module, name)
    return function
