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
