"""A convolutional network that trains in seconds on a CPU: for 8x8 digits, examples and tests."""

from __future__ import annotations

from torch import nn

from raytrain_opt.models.init import he_init, image_shape, require_positive


def _layer(in_channels: int, out_channels: int, stride: int) -> list[nn.Module]:
    return [
        nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    ]


def small_cnn(
    *, num_classes: int, sample_shape: tuple[int, ...], width: int = 32
) -> nn.Sequential:
    """Build three 3x3 convolutions with batch norm and relu, an average and a linear layer.

    Widths `width`, 2 `width` (which halves the resolution) and 2 `width`; 56,554 parameters for
    10 classes and one channel. Input [N, C, H, W] of any size, output [N, num_classes].
    It is not from a paper.
    """
    channels, _, _ = image_shape(sample_shape, "small_cnn")
    width = require_positive("width", width)
    classifier = nn.Linear(2 * width, num_classes)
    model = nn.Sequential(
        *_layer(channels, width, stride=1),
        *_layer(width, 2 * width, stride=2),
        *_layer(2 * width, 2 * width, stride=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        classifier,
    )
    he_init(model, classifier)
    return model
