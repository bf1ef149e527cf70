"""Which model names exist, and the function that each of ours stands for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

# Written as text so that listing and checking names costs no import of torch.
_OURS = {
    "cifar_resnet18": "resnet",
    "cifar_resnet50": "resnet",
    "resnet8": "resnet",
    "small_cnn": "small",
    "vgg16_bn": "vgg",
}

# googlenet and inception_v3 answer with two outputs in training unless their auxiliary head is
# off, and warn about a slow initialisation unless told to do it. The loop takes one output.
_TWO_HEADED = {"aux_logits": False, "init_weights": True}
TORCHVISION_DEFAULTS: dict[str, dict[str, Any]] = {
    "googlenet": _TWO_HEADED,
    "inception_v3": _TWO_HEADED,
}


def model_names() -> list[str]:
    """Names of our own models, sorted."""
    return sorted(_OURS)


def torchvision_names() -> list[str]:
    """Names of torchvision's classification models that are not taken by ours, sorted.

    Imports torchvision, which takes seconds.
    """
    from torchvision import models

    return sorted(set(models.list_models(module=models)) - set(_OURS))


def our_function(name: str) -> Callable[..., Any]:
    """The function behind one of our names. Imports torch."""
    module = importlib.import_module(f"raytrain_opt.models.{_OURS[name]}")
    function: Callable[..., Any] = getattr(module, name)
    return function
