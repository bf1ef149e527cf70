"""The built-in networks, for small images; ResNets with the parameter names of torchvision's.

    stem      3x3 convolution of stride 1, batch norm, relu; no max-pool
    stage i   n_i residual blocks of width 2^(i-1) times the first; from stage 2 on, the first
              block halves the resolution
    head      average over all positions, linear layer

torchvision's ImageNet form has a 7x7 stem of stride 2 and a max-pool instead, which would leave
one position of a 32x32 image; here the last of four stages sees 4x4.
Source: He, Zhang, Ren and Sun, Deep Residual Learning for Image Recognition, CVPR 2016. The
bottleneck halves the resolution in its 3x3 convolution (often called v1.5), as torchvision's
does. Parameter counts below are for 10 classes and 3 channels.

VGG16 is the one of Serizawa and Tatebe on automatic optimization of the mini-batch size, after
Simonyan and Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition, ICLR
2015. `small_cnn` trains in seconds on a CPU: for 8x8 digits, examples and tests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

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


def _conv(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    padding = kernel // 2
    return nn.Conv2d(in_channels, out_channels, kernel, stride, padding, bias=False)


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    """Return a projection where the shape changes, else None: the input itself is added."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(_conv(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: [N, C, H, W] -> [N, width, H/stride, W/stride]."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(in_channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += shortcut
        return self.relu(out)  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 and a shortcut: [N, C, H, W] -> [N, 4 width, H/stride, W/stride]."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.conv1 = _conv(in_channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, out_channels, 1)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += shortcut
        return self.relu(out)  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """Input [N, C, H, W], output [N, num_classes]; `blocks[i]` residual blocks in stage i + 1."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: tuple[int, ...],
        *,
        width: int,
        in_channels: int,
        num_classes: int,
    ) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, width, 3)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self._stages: list[str] = []
        channels = width
        for index, count in enumerate(blocks):
            stage = nn.Sequential()
            for block_index in range(count):
                stride = 2 if index > 0 and block_index == 0 else 1
                stage.append(block(channels, width * 2**index, stride))
                channels = width * 2**index * block.expansion
            self._stages.append(f"layer{index + 1}")
            self.add_module(self._stages[-1], stage)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)
        he_init(self, self.fc)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        for stage in self._stages:
            x = getattr(self, stage)(x)
        return self.fc(self.avgpool(x).flatten(1))  # type: ignore[no-any-return]


def _resnet(
    name: str,
    block: type[BasicBlock] | type[Bottleneck],
    blocks: tuple[int, ...],
    *,
    num_classes: int,
    sample_shape: tuple[int, ...],
    width: int,
) -> ResNet:
    """Build a network for images of any size and number of channels (made for 32x32)."""
    channels, _, _ = image_shape(sample_shape, name)
    width = require_positive("width", width)
    return ResNet(block, blocks, width=width, in_channels=channels, num_classes=num_classes)


# The paper's CIFAR network (section 4.2) with n = 1: 78,042 parameters. Where the shape changes,
# the shortcut is a projection (the paper's option B).
resnet8 = partial(_resnet, "resnet8", BasicBlock, (1, 1, 1), width=16)
# Table 1 with a 3x3 stem: 11,173,962 and 23,520,842 parameters.
cifar_resnet18 = partial(_resnet, "cifar_resnet18", BasicBlock, (2, 2, 2, 2), width=64)
cifar_resnet50 = partial(_resnet, "cifar_resnet50", Bottleneck, (3, 4, 6, 3), width=64)
# Serizawa and Tatebe report 45 convolutions in blocks of three: 15 blocks, where ResNet-50 has 16;
# which block is missing is our reading. With the stem and four projections, 50 convolutions and
# 22,403,658 parameters.
cifar_resnet45 = partial(_resnet, "cifar_resnet45", Bottleneck, (3, 4, 5, 3), width=64)


def resnet45(*, num_classes: int, sample_shape: tuple[int, ...]) -> nn.Module:
    """Build it with the stem for ImageNet: torchvision's ResNet-50 without one block."""
    from torchvision.models.resnet import Bottleneck as ImageNetBottleneck
    from torchvision.models.resnet import ResNet as ImageNetResNet

    if image_shape(sample_shape, "resnet45")[0] != 3:
        raise DataError("model", "resnet45 takes images of 3 channels; use cifar_resnet45")
    model: nn.Module = ImageNetResNet(ImageNetBottleneck, [3, 4, 5, 3], num_classes=num_classes)
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


# Output channels of the 13 convolutions; a 2x2 max-pool follows each of the 5 groups.
_GROUPS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
_REDUCTION = 2 ** len(_GROUPS)


class Vgg16(nn.Module):
    """13 3x3 convolutions with relu, 5 max-pools, 2 linear layers: [N, C, H, W] -> [N, classes].

    The first linear layer sees all positions that the pools leave (one for 32x32), so an
    instance takes images of one size.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        num_classes: int,
        normalize_convolutions: bool,
        hidden: int,
        dropout: float,
    ) -> None:
        super().__init__()
        channels, height, width = shape
        self.features = _features(channels, normalize_convolutions)
        positions = (height // _REDUCTION) * (width // _REDUCTION)
        self.fc1 = nn.Linear(_GROUPS[-1][-1] * positions, hidden)
        self.bn_fc1 = nn.BatchNorm1d(hidden)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(dropout)
        self.fc2 = nn.Linear(hidden, num_classes)
        he_init(self, self.fc2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x).flatten(1)
        x = self.relu(self.bn_fc1(self.fc1(x)))
        return self.fc2(self.dropout(x))  # type: ignore[no-any-return]


def _features(channels: int, batch_norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for group in _GROUPS:
        for out_channels in group:
            # A bias would be undone by the normalization that follows.
            layers.append(nn.Conv2d(channels, out_channels, 3, padding=1, bias=not batch_norm))
            if batch_norm:
                layers.append(nn.BatchNorm2d(out_channels))
            layers.append(nn.ReLU(inplace=True))
            channels = out_channels
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


def _vgg16(
    name: str,
    normalize_convolutions: bool,
    *,
    num_classes: int,
    sample_shape: tuple[int, ...],
    hidden: int = 512,
    dropout: float = 0.0,
) -> Vgg16:
    """Build it with `hidden` features between the linear layers. Raises DataError below 32x32."""
    shape = image_shape(sample_shape, name)
    if min(shape[1:]) < _REDUCTION:
        rule = f"{name} halves images 5 times and needs at least {_REDUCTION}x{_REDUCTION} pixels"
        hint = "Use resnet8, cifar_resnet18 or small_cnn, or larger images."
        raise DataError("model.name", f"{rule}; these data have {shape[1]}x{shape[2]}. {hint}")
    require_positive("hidden", hidden)
    return Vgg16(shape, num_classes, normalize_convolutions, hidden, dropout)


# A normalization after every convolution and the first linear layer, as in Chainer's sample for
# CIFAR, which Serizawa and Tatebe train; 14,987,722 parameters for 10 classes and 3 x 32 x 32.
vgg16_bn = partial(_vgg16, "vgg16_bn", True)
# Serizawa and Tatebe count one normalization; taken literally, after the first linear layer, it
# trains far less easily. 14,983,498 parameters.
vgg16_one_bn = partial(_vgg16, "vgg16_one_bn", False)


# They take num_classes and sample_shape.
BUILTIN_MODELS: dict[str, Callable[..., nn.Module]] = {
    "cifar_resnet18": cifar_resnet18,
    "cifar_resnet45": cifar_resnet45,
    "cifar_resnet50": cifar_resnet50,
    "resnet8": resnet8,
    "resnet45": resnet45,
    "small_cnn": small_cnn,
    "vgg16_bn": vgg16_bn,
    "vgg16_one_bn": vgg16_one_bn,
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
