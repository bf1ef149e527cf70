"""Networks of the comparison's tasks, named in job files as functions of this module."""

from __future__ import annotations

import math
from typing import Any


def mlp(*, num_classes: int, sample_shape: tuple[int, ...], width: int) -> Any:
    """Return two hidden layers of `width` units."""
    from torch import nn

    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(sample_shape), width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, num_classes),
    )


def vgg_without_norm(*, num_classes: int, sample_shape: tuple[int, ...], width: int) -> Any:
    """Return six 3 x 3 convolutions without BatchNorm; every second one is pooled."""
    from torch import nn

    channels, height, width_px = sample_shape
    layers: list[nn.Module] = []
    for out in (width, 2 * width, 4 * width):
        for _ in range(2):
            layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU()]
            channels = out
        layers.append(nn.MaxPool2d(2))
    features = channels * (height // 8) * (width_px // 8)
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, num_classes))
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return network


def vision_transformer(
    *, num_classes: int, sample_shape: tuple[int, ...], width: int, patch: int
) -> Any:
    """Return four pre-norm blocks with four heads on patches; the mean of all tokens decides."""
    import torch
    from torch import nn

    class VisionTransformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            channels, height, width_px = sample_shape
            tokens = (height // patch) * (width_px // patch)
            self.patches = nn.Conv2d(channels, width, patch, stride=patch)
            self.positions = nn.Parameter(0.02 * torch.randn(1, tokens, width))
            block = nn.TransformerEncoderLayer(
                width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            self.blocks = nn.TransformerEncoder(block, 4, enable_nested_tensor=False)
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, num_classes)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
            return self.head(self.norm(self.blocks(tokens)).mean(1))  # type: ignore[no-any-return]

    return VisionTransformer()


def convnext(*, num_classes: int, sample_shape: tuple[int, ...], width: int) -> Any:
    """Return two stages of three ConvNeXt blocks with depthwise 5 x 5 convolutions."""
    import torch
    from torch import nn

    class ChannelsFirstNorm(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(channels)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            normalized: torch.Tensor = self.norm(images.permute(0, 2, 3, 1))
            return normalized.permute(0, 3, 1, 2)

    class Block(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.depthwise = nn.Conv2d(channels, channels, 5, padding=2, groups=channels)
            self.layers = nn.Sequential(
                nn.LayerNorm(channels),
                nn.Linear(channels, 4 * channels),
                nn.GELU(),
                nn.Linear(4 * channels, channels),
            )
            self.scale = nn.Parameter(0.1 * torch.ones(channels))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            changed: torch.Tensor = self.layers(self.depthwise(images).permute(0, 2, 3, 1))
            return images + (self.scale * changed).permute(0, 3, 1, 2)

    channels, height, _ = sample_shape
    odd = height // 2 % 2
    return nn.Sequential(
        nn.Conv2d(channels, width, 2, stride=2),
        ChannelsFirstNorm(width),
        *(Block(width) for _ in range(3)),
        ChannelsFirstNorm(width),
        nn.Conv2d(width, 2 * width, 2, stride=2, padding=odd),
        *(Block(2 * width) for _ in range(3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.LayerNorm(2 * width),
        nn.Linear(2 * width, num_classes),
    )


def text_transformer(*, num_classes: int, sample_shape: tuple[int, ...], width: int) -> Any:
    """Return two pre-norm blocks with four heads on characters; the last token decides."""
    import torch
    from torch import nn

    class TextTransformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.characters = nn.Embedding(num_classes, width)
            self.positions = nn.Parameter(0.02 * torch.randn(1, sample_shape[0], width))
            block = nn.TransformerEncoderLayer(
                width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, num_classes)

        def forward(self, characters: torch.Tensor) -> torch.Tensor:
            tokens = self.characters(characters.long()) + self.positions
            return self.head(self.norm(self.blocks(tokens)[:, -1]))  # type: ignore[no-any-return]

    return TextTransformer()


def text_gru(*, num_classes: int, sample_shape: tuple[int, ...], width: int) -> Any:
    """Return a GRU over characters; its last output decides."""
    import torch
    from torch import nn

    class TextGru(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.characters = nn.Embedding(num_classes, 24)
            self.recurrent = nn.GRU(24, width, batch_first=True)
            self.head = nn.Linear(width, num_classes)

        def forward(self, characters: torch.Tensor) -> torch.Tensor:
            outputs, _ = self.recurrent(self.characters(characters.long()))
            return self.head(outputs[:, -1])  # type: ignore[no-any-return]

    return TextGru()
