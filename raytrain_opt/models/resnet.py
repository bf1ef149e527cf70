"""Residual networks for small images, with the parameter names of torchvision's ResNets.

    stem      3x3 convolution of stride 1, batch norm, relu; no max-pool
    stage i   n_i residual blocks of width 2^(i-1) times the first; from stage 2 on, the first
              block halves the resolution
    head      average over all positions, linear layer

torchvision's ImageNet form has a 7x7 stem of stride 2 and a max-pool instead, which would leave
one position of a 32x32 image; here the last of four stages sees 4x4.
Source: He, Zhang, Ren and Sun, Deep Residual Learning for Image Recognition, CVPR 2016. The
bottleneck halves the resolution in its 3x3 convolution (often called v1.5), as torchvision's
does. Parameter counts below are for 10 classes and 3 channels.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from raytrain_opt.errors import DataError
from raytrain_opt.models.init import he_init, image_shape, require_positive


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
