"""VGG16 for small images, as the work on the automatic mini-batch size trains it.

Source: Serizawa and Tatebe on automatic optimization of the mini-batch size, after Simonyan and
Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition, ICLR 2015.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from raytrain_opt.errors import DataError
from raytrain_opt.models.init import he_init, image_shape, require_positive

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
