"""Shared by the built-in models: He initialization and checks of arguments."""

from __future__ import annotations

from torch import nn

from raytrain_opt.errors import DataError


def he_init(model: nn.Module, classifier: nn.Linear) -> None:
    """Initialize all layers but the last by He's rule (normal, fan_out, relu), in place.

    Normalization starts as the identity and biases at zero. The classifier keeps torch's own
    initialization: its fan_out is the number of classes, so He's rule, made for layers followed
    by a relu, would start with huge logits.
    Source: He et al., Delving Deep into Rectifiers, ICCV 2015.
    """
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)) and module is not classifier:
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
            nn.init.ones_(module.weight)
        else:
            continue
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def image_shape(sample_shape: tuple[int, ...], model: str) -> tuple[int, int, int]:
    """Return `sample_shape` as (channels, height, width). Raises DataError if it is no image."""
    if len(sample_shape) != 3:
        rule = (
            f"{model} takes images [channels, height, width], these data have {list(sample_shape)}"
        )
        hint = "Use images, or your own model as package.module:function."
        raise DataError("model.name", f"{rule}. {hint}")
    channels, height, width = sample_shape
    return channels, height, width


def require_positive(name: str, value: int) -> int:
    """Return `value` if it is an integer above zero. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer above 0, not {value!r}")
    return value
