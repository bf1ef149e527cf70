"""The built-in models by name, and the names of torchvision's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from raytrain_opt.models import resnet, small_cnn, vgg

# They take num_classes and sample_shape.
BUILTIN_MODELS: dict[str, Callable[..., nn.Module]] = {
    "cifar_resnet18": resnet.cifar_resnet18,
    "cifar_resnet45": resnet.cifar_resnet45,
    "cifar_resnet50": resnet.cifar_resnet50,
    "resnet8": resnet.resnet8,
    "resnet45": resnet.resnet45,
    "small_cnn": small_cnn.small_cnn,
    "vgg16_bn": vgg.vgg16_bn,
    "vgg16_one_bn": vgg.vgg16_one_bn,
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
    return sorted(BUILTIN_MODELS)


def torchvision_names() -> list[str]:
    """Return torchvision's classification models without built-in names, sorted; imports it."""
    from torchvision import models

    return sorted(set(models.list_models(module=models)) - set(BUILTIN_MODELS))
