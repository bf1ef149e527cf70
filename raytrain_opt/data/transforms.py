"""Crop, mirror, normalize and augment batches.

    u    uint8 value of a pixel, 0..255         m, s    mean and standard deviation of its channel,
    v    value that the model sees                      of values scaled to 0..1

    crop and mirror   out[i, j] = padded[top + i, left + j],  j counted from the right if mirrored
    images            v = (u / 255 - m) / s, computed as u a + b with a = 1 / (255 s), b = -m / s
    other values      v = x / s - m / s along the first axis, or x itself

Cropping pads with black before normalizing, as torchvision's RandomCrop does. Images are uint8
[samples, height, width, channels] until the last operation: a quarter of the memory traffic of
float32. Every operation is elementwise or a gather, and a product and a sum are never fused into
one rounding: so the values of a sample do not depend on the micro-batch, bit for bit.

Augmentation beyond crop and mirror: a policy for each image, then mixing batches.

    x, y    samples and labels of a micro-batch        x', y'   the same in reverse order
    G       the generators of `sampling`: draws depend on seed, epoch e, step t, nothing else

    policy   RandAugment or TrivialAugment of torchvision, on uint8, with the seed of the sample
    mixup    w x + (1 - w) x',  w ~ Beta(a, a) from G(s, MIX, e, t), one w for each step
    cutmix   x' in a box of x, whose area is 1 - w of the image; if both are on, each half the time
    loss     w loss(output, y) + (1 - w) loss(output, y')

Sources: Cubuk et al., RandAugment, 2020; Müller and Hutter, TrivialAugment, 2021; Zhang et al.,
mixup, 2018; Yun et al., CutMix, 2019; timm (reverse order). Of the micro-batch, as x' would have
to be read on another worker too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from raytrain_opt.config.data import BatchAugment
from raytrain_opt.data.base import Batch
from raytrain_opt.data.sampling import CropFlip, Indices, Purpose, generator, sample_seed
from raytrain_opt.errors import DataError
from raytrain_opt.random_state import preserve_random_state, seed_all

NormalizeSetting = Literal["auto", "none"] | tuple[list[float], list[float]]
MeanStd = tuple[Sequence[float], Sequence[float]]
Transform = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Preprocessing:
    """What turns a sample into the input of the model; checkpoints hold it.

    `mean_std`: of each channel; of an image's values scaled to 0..1. `center_crop`: an image file
    is resized and cropped as in an evaluation on ImageNet, else height and width are resized.
    """

    is_image: bool
    mean_std: tuple[list[float], list[float]] | None
    center_crop: bool = False


def describe_input(preprocessing: Preprocessing, shape: Sequence[int]) -> dict[str, Any]:
    """Return in order how other tools prepare a sample of this `shape` for a network."""
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

    `auto`: statistics for `normalize: auto`; None only scales to 0..1. Raises DataError: not one
    value (or one for all) per channel, or a deviation that is not positive.
    """
    if isinstance(normalize, str) or not shape:
        mean_std = (auto or ([0.0], [1.0])) if is_image else None
        lists = mean_std and (list(mean_std[0]), list(mean_std[1]))
        return Preprocessing(is_image, lists, center_crop)
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
    """Return the transform of batches: uint8 images [N, H, W, C] become float32 [N, C, H, W].

    Other values are unchanged, or normalized along the first axis of their samples' `shape`.
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

    images [N, H, W, C]. Sums are exact sums of integers, chunk by chunk.
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
    """Return a small tensor on the device; from pinned memory, so that the CPU does not wait."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


class CopyStream:
    """Copies from pinned memory, on a CUDA stream of its own.

    The training loop never waits for the device, so the CPU is ahead of it: a copy that is queued
    on this stream runs beside the updates before it. Only the GPU waits for it, before it uses
    the copy. On CPU the tensors themselves are returned.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def copy(self, *tensors: Tensor) -> list[Tensor]:
        """Return the tensors on the device."""
        if self._stream is None:
            return [tensor.to(self._device) for tensor in tensors]
        with torch.cuda.stream(self._stream):
            copies = [t.pin_memory().to(self._device, non_blocking=True) for t in tensors]
        training = torch.cuda.current_stream(self._device)
        training.wait_stream(self._stream)
        for copied in copies:
            # Its memory must not be reused before the training has read it.
            copied.record_stream(training)
        return copies


_NEEDS, _IMAGES = "needs {}, which these samples are not", "images [channels, height, width]"

Floats = npt.NDArray[np.float64]


class Augmentation:
    """What `data.augment` adds to crop and mirror.

    Raises DataError for settings that need images where the samples are none.
    """

    def __init__(
        self, section: BatchAugment, seed: int, sample_shape: tuple[int, ...], *, is_uint8: bool
    ) -> None:
        self._section, self._seed = section, seed
        if section.policy != "none" and not (is_uint8 and sample_shape[0] in (1, 3)):
            rule = _NEEDS.format("uint8 images of 1 or 3 channels")
            raise DataError("data.augment.policy", rule)
        if section.cutmix and len(sample_shape) != 3:
            raise DataError("data.augment.cutmix", _NEEDS.format(_IMAGES))
        self.policy = _make_policy(section)

    def apply_policy(self, images: torch.Tensor, epoch: int, keys: Indices) -> torch.Tensor:
        """Return images, uint8 [N, H, W, C], each changed with the seed of its key."""
        if self.policy is None:
            return images
        with preserve_random_state():
            changed = []
            for image, key in zip(images, keys, strict=True):
                seed_all(sample_seed(self._seed, Purpose.TRAIN_SAMPLE, epoch, key))
                changed.append(self.policy(image.permute(2, 0, 1)).permute(1, 2, 0))
            return torch.stack(changed)

    def __call__(self, batch: Batch, epoch: int, step: int) -> Batch:
        """Mix a micro-batch of the step."""
        mixup, cutmix = self._section.mixup, self._section.cutmix
        if not mixup and not cutmix:
            return batch
        random = generator(self._seed, Purpose.MIX, epoch, step)
        use_cutmix = random.random() < (0.5 if mixup and cutmix else float(cutmix > 0))
        alpha = cutmix if use_cutmix else mixup
        weight = float(random.beta(alpha, alpha))
        other = batch.x.flip(0)
        if not use_cutmix:
            x = torch.lerp(other, batch.x, weight)
        else:
            height, width = batch.x.shape[-2:]
            box, weight = _cutmix_box(weight, random.random(2), height, width)
            x = batch.x.clone(memory_format=torch.preserve_format)
            x[..., box[0], box[1]] = other[..., box[0], box[1]]
        return replace(batch, x=x, other_y=batch.y.flip(0), weight=weight)


def _make_policy(section: BatchAugment) -> Any:
    """Return torchvision's transform of one uint8 image [C, H, W]; None for no policy."""
    if section.policy == "none":
        return None
    from torchvision.transforms import v2  # takes seconds to import

    return v2.RandAugment() if section.policy == "rand_augment" else v2.TrivialAugmentWide()


def _cutmix_box(
    weight: float, center: Floats, height: int, width: int
) -> tuple[tuple[slice, slice], float]:
    """Return rows and columns of the box, cut off at the edges, and 1 - its part of the area."""
    spans, area = [], 1.0
    for position, size in zip(center, (height, width), strict=True):
        half = size * math.sqrt(1 - weight) / 2
        start, stop = (round(min(max(position * size + d, 0), size)) for d in (-half, half))
        spans.append(slice(start, stop))
        area *= (stop - start) / size
    return (spans[0], spans[1]), 1 - area
