"""The network of jobs/imagenet_cnn11_async.yaml: eleven convolutions, 15,047,208 parameters.

The paper describes its network only by that number. This one lies between VGG11 and VGG16, with
batch normalization and without the large linear layers, which would be most of the data that
workers send.
"""

from __future__ import annotations

from torch import nn

# Output channels of the convolutions; a 2x2 max-pool follows each group.
GROUPS = ((64,), (128,), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def make_model(num_classes: int) -> nn.Module:
    """Build the network: images [N, 3, H, W], H and W at least 32, to logits [N, num_classes]."""
    layers: list[nn.Module] = []
    channels = 3
    for group in GROUPS:
        for width in group:
            layers += [
                nn.Conv2d(channels, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)
    )
