"""Crop, mirror, normalize and augment images.

    u    uint8 value of a pixel, 0..255         m, s    mean and standard deviation of its channel,
    v    value that the model sees                      of values scaled to 0..1

    crop and mirror   out[i, j] = padded[top + i, left + j],  j counted from the right if mirrored
    images            v = (u / 255 - m) / s, computed as u a + b with a = 1 / (255 s), b = -m / s
    other values      v = x / s - m / s along the first axis, or x itself

Cropping pads with black before normalizing, as torchvision's RandomCrop does. Images are uint8
[samples, height, width, channels] until the last operation: a quarter of the memory traffic of
float32, and already the memory layout of channels_last. Every operation is elementwise or a
gather, and a product and a sum are never fused into one rounding: so the values of a sample do
not depend on how the global batch is cut into micro-batches, bit for bit.
ImageNet's means and standard deviations are those of torchvision's pretrained models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from raytrain_opt.config.data import PolicyName
from raytrain_opt.data.sampling import CropFlip, Indices
from raytrain_opt.errors import DataError

NormalizeSetting = Literal["auto", "none"] | tuple[list[float], list[float]]
MeanStd = tuple[Sequence[float], Sequence[float]]
Transform = Callable[[torch.Tensor], torch.Tensor]
Policy = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Preprocessing:
    """What turns a sample into the input of the model; checkpoints hold it.

    `is_image`: samples are uint8 images. `mean_std`: of each channel; of an image's values scaled
    to 0..1. `center_crop`: an image file is resized and cropped as in an evaluation on ImageNet,
    else its height and width are resized independently.
    """

    is_image: bool
    mean_std: tuple[list[float], list[float]] | None
    center_crop: bool = False


def describe_input(preprocessing: Preprocessing, shape: Sequence[int]) -> dict[str, Any]:
    """Return how other tools prepare a sample for a network of samples of this `shape`, in order.

    The values are those of `data.images` and of `make_transform`.
    """
    steps: dict[str, Any] = {}
    if preprocessing.is_image:
        channels, height, width = shape
        size: dict[str, Any] = {"height": height, "width": width}
        steps["decode"] = "RGB" if channels == 3 else "RGB, then 0.299 R + 0.587 G + 0.114 B"
        steps["resize"] = {"interpolation": "bilinear", "antialias": True, **size}
        if preprocessing.center_crop:
            side = {"shorter_side": round(height * 256 / 224), "longer_side": "rounded down"}
            steps["resize"] = {"interpolation": "bilinear", "antialias": True, **side}
            steps["center_crop"] = size
        steps["divide_by"] = 255
    if preprocessing.mean_std is not None:
        steps["subtract"], steps["then_divide_by"] = preprocessing.mean_std
        steps["dtype"] = "float32"
    return {**steps, "shape": ["batch", *shape]}


IMAGENET_MEAN_STD: MeanStd = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])

# The squares of 256 values of 255 still add up exactly in float32 (256 x 255^2 < 2^24).
_CHUNK_IMAGES = 256
# Of a constant channel, which would otherwise be divided by 0.
_MIN_STD = 1e-6


def crop_and_flip(images: torch.Tensor, draws: CropFlip, padding: int) -> torch.Tensor:
    """Pad images [N, H, W, C] with zeros on all sides, crop to H x W at `draws`, mirror.

    Equals torchvision's RandomCrop(size, padding) and RandomHorizontalFlip with these draws,
    but gathers the pixels of all images at once.
    """
    samples, height, width, channels = images.shape
    device = images.device
    padded = pad(images, (0, 0, padding, padding, padding, padding))
    dtype = torch.int32 if padded.numel() < 2**31 else torch.int64
    top, left, flip = (
        send(torch.from_numpy(draw)[:, None].to(dtype), device)
        for draw in (draws.top, draws.left, draws.flip)
    )
    across = torch.arange(width, dtype=dtype, device=device)
    columns = left + torch.where(flip > 0, width - 1 - across, across)
    rows = top + torch.arange(height, dtype=dtype, device=device)
    rows += torch.arange(samples, dtype=dtype, device=device)[:, None] * padded.shape[1]
    pixels = rows[:, :, None] * padded.shape[2] + columns[:, None, :]
    gathered = padded.view(-1, channels).index_select(0, pixels.view(-1))
    return gathered.view(samples, height, width, channels)


def resolve_preprocessing(
    normalize: NormalizeSetting,
    shape: tuple[int, ...],
    is_image: bool,
    auto: MeanStd | None,
    *,
    center_crop: bool = False,
) -> Preprocessing:
    """Return what `data.normalize` asks for, for samples of this `shape` for the model.

    `auto`: the statistics of images for `normalize: auto`; None only scales them to 0..1. Raises
    DataError: not one value (or one for all) per channel, or a deviation that is not positive.
    """
    if isinstance(normalize, str) or not shape:
        mean_std = (auto or ([0.0], [1.0])) if is_image else None
        return Preprocessing(
            is_image, mean_std and (list(mean_std[0]), list(mean_std[1])), center_crop
        )
    means, stds = normalize
    for values in (means, stds):
        if len(values) not in (1, shape[0]):
            rule = "write one for each channel, or one for all: [[means], [standard deviations]]"
            given = f"{len(values)} values for {shape[0]} channels"
            raise DataError("data.normalize", f"{given}; {rule}")
    if not (np.isfinite(means).all() and np.isfinite(stds).all() and min(stds) > 0):
        rule = "means must be finite and standard deviations above 0"
        raise DataError("data.normalize", f"{rule} (given: {normalize})")
    return Preprocessing(is_image, (list(means), list(stds)), center_crop)


def make_transform(
    preprocessing: Preprocessing, shape: tuple[int, ...], device: torch.device, channels_last: bool
) -> Transform:
    """Return the transform of batches whose samples have this `shape` for the model.

    uint8 images [N, H, W, C] become float32 [N, C, H, W]. Other values are unchanged, or
    normalized along their first axis.
    """
    is_image, mean_std = preprocessing.is_image, preprocessing.mean_std
    is_3d = channels_last and len(shape) == 3
    memory_format = torch.channels_last if is_3d else torch.contiguous_format
    if mean_std is None:
        return lambda values: values.contiguous(memory_format=memory_format)
    mean, std = (np.broadcast_to(np.asarray(v, np.float64), shape[0]) for v in mean_std)
    factors = [v.astype(np.float32) for v in (1 / (255 * std if is_image else std), -mean / std)]
    if is_image:
        # One factor per value of an image, not per channel: an inner loop over 3 channels would be
        # several times as slow.
        factors = [np.tile(v, math.prod(shape[1:])) for v in factors]
    else:
        factors = [v.reshape(-1, *[1] * (len(shape) - 1)) for v in factors]
    scale, shift = (torch.from_numpy(v).to(device) for v in factors)

    def transform(x: torch.Tensor) -> torch.Tensor:
        values = (x.reshape(len(x), -1) if is_image else x).to(torch.float32, copy=True)
        values.mul_(scale).add_(shift)
        if is_image:
            values = values.view(x.shape).permute(0, 3, 1, 2)
        return values.contiguous(memory_format=memory_format)

    return transform


def channel_mean_std(images: npt.NDArray[np.uint8], indices: Indices) -> MeanStd:
    """Compute mean and standard deviation of each channel, in 0..1, over images[indices].

    images [N, H, W, C]. Sums are exact sums of integers, chunk by chunk; a standard deviation
    is at least 1e-6.
    """
    channels = images.shape[-1]
    total = np.zeros((2, channels))
    for start in range(0, len(indices), _CHUNK_IMAGES):
        chunk = images[indices[start : start + _CHUNK_IMAGES]]
        values = torch.from_numpy(chunk.reshape(len(chunk), -1)).to(torch.float32)
        for row, sums in enumerate((values.sum(0), values.square_().sum(0))):
            total[row] += sums.double().numpy().reshape(-1, channels).sum(0)
    mean, square = total / (len(indices) * images.shape[1] * images.shape[2])
    std = np.sqrt(np.maximum(square - mean**2, 0))
    return (mean / 255).tolist(), np.maximum(std / 255, _MIN_STD).tolist()


def send(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device; from pinned memory, so that the CPU does not wait."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def make_policy(name: PolicyName, shape: tuple[int, ...], is_image: bool) -> Policy | None:
    """Return torchvision's policy for a uint8 image [H, W, C]; None for `none`.

    It draws from the global generators. Sources: Cubuk et al., RandAugment, 2020; Müller and
    Hutter, TrivialAugment, 2021. Raises DataError for samples that are no such images.
    """
    if name == "none":
        return None
    if not (is_image and shape[0] in (1, 3)):
        rule = "needs uint8 images of 1 or 3 channels, which these samples are not"
        raise DataError("data.augment.policy", rule)
    from torchvision.transforms import v2  # takes seconds to import

    policy = v2.RandAugment() if name == "rand_augment" else v2.TrivialAugmentWide()
    return partial(_change, policy)


def _change(policy: Policy, image: Tensor) -> Tensor:
    return policy(image.permute(2, 0, 1)).permute(1, 2, 0)
