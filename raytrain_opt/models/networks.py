"""The built-in networks, for small images; ResNets with the parameter names of torchvision's.

    stem      3x3 convolution of stride 1, batch norm, relu; no max-pool
    stage i   n_i residual blocks of width 2^(i-1) times the first; from stage 2 on, the first
              block halves the resolution
    head      average over all positions, linear layer

The bottleneck halves the resolution in its 3x3 convolution, as torchvision's does. Parameter
counts below are for 10 classes and 3 channels. VGG16 is the one of Serizawa and Tatebe;
`small_cnn` is for 8x8 digits, examples and tests. Sources: docs/references.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn


def he_init(model: nn.Module, classifier: nn.Linear) -> None:
    """Initialize all layers but the last by He's rule (normal, fan_out, relu), in place.

    Normalization starts as the identity and biases at zero. The classifier keeps torch's own
    initialization: He's rule, with the number of classes as fan_out, would start with huge logits.
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


def _conv(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, bias=False)


class ResidualBlock(nn.Module):
    """Convolutions, each with batch norm, and a shortcut: [N, C, H, W] -> [N, C', H/s, W/s].

    Convolution i has `kernels[i]` and `widths[i]` output channels; the first one with a 3x3 kernel
    has the stride s. Where the shape changes, the shortcut is a projection.
    """

    def __init__(
        self, in_channels: int, kernels: tuple[int, ...], widths: tuple[int, ...], stride: int
    ) -> None:
        super().__init__()
        channels, self._count = (in_channels, *widths), len(kernels)
        for i, kernel in enumerate(kernels):
            own_stride = stride if i == kernels.index(3) else 1
            convolution = _conv(channels[i], channels[i + 1], kernel, own_stride)
            self.add_module(f"conv{i + 1}", convolution)
            self.add_module(f"bn{i + 1}", nn.BatchNorm2d(channels[i + 1]))
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or in_channels != widths[-1]:
            projection = _conv(in_channels, widths[-1], 1, stride)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(widths[-1]))

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for i in range(1, self._count + 1):
            out = self.relu(out) if i > 1 else out
            out = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)  # type: ignore[no-any-return]


def _resnet(
    kernels: tuple[int, ...],
    blocks: tuple[int, ...],
    *,
    num_classes: int,
    sample_shape: tuple[int, ...],
    width: int,
) -> nn.Module:
    """Build a network for images of any size and number of channels (made for 32x32).

    `blocks[i]` residual blocks in stage i + 1, of two 3x3 convolutions or of a bottleneck.
    """
    model = nn.Sequential()
    model.add_module("conv1", _conv(sample_shape[0], width, 3))
    model.add_module("bn1", nn.BatchNorm2d(width))
    model.add_module("relu", nn.ReLU(inplace=True))
    channels = width
    for stage, count in enumerate(blocks):
        inner = width * 2**stage
        widths = (inner, inner) if len(kernels) == 2 else (inner, inner, 4 * inner)
        layer = nn.Sequential()
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            layer.append(ResidualBlock(channels, kernels, widths, stride))
            channels = widths[-1]
        model.add_module(f"layer{stage + 1}", layer)
    model.add_module("avgpool", nn.AdaptiveAvgPool2d(1))
    model.add_module("flatten", nn.Flatten())
    classifier = nn.Linear(channels, num_classes)
    model.add_module("fc", classifier)
    he_init(model, classifier)
    return model


_BASIC, _BOTTLENECK = (3, 3), (1, 3, 1)
# The paper's CIFAR network (section 4.2) with n = 1 and 3: 78,042 and 272,474 parameters. Where
# the shape changes, the shortcut is a projection (the paper's option B).
resnet8 = partial(_resnet, _BASIC, (1, 1, 1), width=16)
resnet20 = partial(_resnet, _BASIC, (3, 3, 3), width=16)
# Table 1 with a 3x3 stem: 11,173,962 and 23,520,842 parameters.
cifar_resnet18 = partial(_resnet, _BASIC, (2, 2, 2, 2), width=64)
cifar_resnet50 = partial(_resnet, _BOTTLENECK, (3, 4, 6, 3), width=64)
# Serizawa and Tatebe report 45 convolutions in blocks of three: 15 blocks, where ResNet-50 has 16;
# which block is missing is our reading. With the stem and four projections, 50 convolutions and
# 22,403,658 parameters.
cifar_resnet45 = partial(_resnet, _BOTTLENECK, (3, 4, 5, 3), width=64)


def resnet45(*, num_classes: int, sample_shape: tuple[int, ...]) -> nn.Module:
    """Build it with the stem for ImageNet: torchvision's ResNet-50 without one block."""
    from torchvision.models.resnet import Bottleneck, ResNet

    model: nn.Module = ResNet(Bottleneck, [3, 4, 5, 3], num_classes=num_classes)
    return model


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
    10 classes and one channel. Input [N, C, H, W] of any size.
    """
    classifier = nn.Linear(2 * width, num_classes)
    model = nn.Sequential(
        *_layer(sample_shape[0], width, stride=1),
        *_layer(width, 2 * width, stride=2),
        *_layer(2 * width, 2 * width, stride=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        classifier,
    )
    he_init(model, classifier)
    return model


# Output channels of the 13 convolutions; a 2x2 max-pool follows each of the 5 groups.
_GROUPS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
_REDUCTION = 2 ** len(_GROUPS)
_HIDDEN = 512


def _vgg16(
    normalize_convolutions: bool, *, num_classes: int, sample_shape: tuple[int, ...]
) -> nn.Module:
    """Build 13 3x3 convolutions with relu, 5 max-pools, 2 linear layers of 512 inner values."""
    channels, height, width = sample_shape
    layers: list[nn.Module] = []
    for group in _GROUPS:
        for out_channels in group:
            layer = _layer(channels, out_channels, stride=1)
            if not normalize_convolutions:
                layer = [nn.Conv2d(channels, out_channels, 3, padding=1), layer[-1]]
            layers += layer
            channels = out_channels
        layers.append(nn.MaxPool2d(2))
    # One for 32x32. Smaller images are refused by the last pool, in the check of the output.
    positions = max(1, (height // _REDUCTION) * (width // _REDUCTION))
    layers += [nn.Flatten(), nn.Linear(channels * positions, _HIDDEN), nn.BatchNorm1d(_HIDDEN)]
    classifier = nn.Linear(_HIDDEN, num_classes)
    model = nn.Sequential(*layers, nn.ReLU(inplace=True), classifier)
    he_init(model, classifier)
    return model


# A normalization after every convolution and the first linear layer, as in Chainer's sample for
# CIFAR, which Serizawa and Tatebe train; 14,987,722 parameters for 10 classes and 3 x 32 x 32.
vgg16_bn = partial(_vgg16, True)
# Serizawa and Tatebe count one normalization; taken literally, after the first linear layer, it
# trains far less easily. 14,983,498 parameters.
vgg16_one_bn = partial(_vgg16, False)


# They take num_classes and sample_shape.
BUILTIN_MODELS: dict[str, Callable[..., nn.Module]] = {
    "cifar_resnet18": cifar_resnet18,
    "cifar_resnet45": cifar_resnet45,
    "cifar_resnet50": cifar_resnet50,
    "resnet8": resnet8,
    "resnet20": resnet20,
    "resnet45": resnet45,
    "small_cnn": small_cnn,
    "vgg16_bn": vgg16_bn,
    "vgg16_one_bn": vgg16_one_bn,
}


def model_names() -> list[str]:
    """Return the names of the built-in models, sorted."""
    return sorted(BUILTIN_MODELS)


def torchvision_names() -> list[str]:
    """Return torchvision's classification models without built-in names, sorted; imports it."""
    from torchvision import models

    return sorted(set(models.list_models(module=models)) - set(BUILTIN_MODELS))
