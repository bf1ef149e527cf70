"""From stored values to what the model sees: scaling, normalising, cropping, mirroring.

Images are uint8 [samples, height, width, channels] until the last moment: a quarter of the
memory traffic of floats, and in that layout a batch is already in channels_last format.
Everything here is elementwise or a gather, so a batch's result does not depend on how it was
cut into shares, bit for bit (hence a product and a sum, never a fused multiply-add).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from raytrain_opt.data.order import CropFlip, Indices
from raytrain_opt.errors import DataError

Normalize = Literal["auto", "none"] | tuple[list[float], list[float]]
Moments = tuple[Sequence[float], Sequence[float]]
Prepare = Callable[[torch.Tensor], torch.Tensor]

PLAIN: Moments = ([0.0], [1.0])
IMAGENET: Moments = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])

# 256 squares of 255 still add up exactly in float32 (256 x 255^2 < 2^24).
_ROWS_PER_CHUNK = 256
_LEAST_DEVIATION = 1e-6


def crop_and_flip(images: torch.Tensor, draws: CropFlip, padding: int) -> torch.Tensor:
    """Pad images [N, H, W, C] with zeros on all sides, crop back at `draws`, mirror.

    The same as torchvision's RandomCrop(size, padding) and RandomHorizontalFlip for given
    draws, as one gather of pixels for the whole batch.
    """
    samples, height, width, channels = images.shape
    device = images.device
    padded = pad(images, (0, 0, padding, padding, padding, padding))
    kind = torch.int32 if padded.numel() < 2**31 else torch.int64
    top, left, flip = (
        torch.from_numpy(draw)[:, None].to(device, kind, non_blocking=True)
        for draw in (draws.top, draws.left, draws.flip)
    )
    across = torch.arange(width, dtype=kind, device=device)
    columns = left + torch.where(flip > 0, width - 1 - across, across)
    rows = top + torch.arange(height, dtype=kind, device=device)
    rows += torch.arange(samples, dtype=kind, device=device)[:, None] * padded.shape[1]
    pixels = rows[:, :, None] * padded.shape[2] + columns[:, None, :]
    gathered = padded.view(-1, channels).index_select(0, pixels.view(-1))
    return gathered.view(samples, height, width, channels)


class ImageScaling:
    """uint8 [N, H, W, C] -> normalised float32 [N, C, H, W] in the wanted memory format."""

    def __init__(
        self,
        moments: Moments,
        shape: tuple[int, int, int],
        device: torch.device,
        channels_last: bool,
    ) -> None:
        height, width, channels = shape
        mean, deviation = (np.broadcast_to(np.asarray(v, np.float64), channels) for v in moments)
        # One factor per value of an image, not per channel: an inner loop over 3 channels
        # would be several times as slow.
        self._scale = _per_value(1 / (255 * deviation), height * width).to(device)
        self._shift = _per_value(-mean / deviation, height * width).to(device)
        self._format = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        values = images.reshape(len(images), -1).to(torch.float32)
        values.mul_(self._scale).add_(self._shift)
        return values.view(images.shape).permute(0, 3, 1, 2).contiguous(memory_format=self._format)


def _per_value(per_channel: npt.NDArray[np.float64], pixels: int) -> torch.Tensor:
    return torch.from_numpy(np.tile(per_channel.astype(np.float32), pixels))


class ValueScaling:
    """Values that are no uint8 images: as they are, or normalised along the first axis."""

    def __init__(
        self,
        moments: Moments | None,
        sample_shape: tuple[int, ...],
        device: torch.device,
        channels_last: bool,
    ) -> None:
        self._factors: tuple[torch.Tensor, torch.Tensor] | None = None
        if moments is not None:
            mean, deviation = (np.asarray(v, np.float32) for v in moments)
            shape = (-1, *[1] * (len(sample_shape) - 1))
            self._factors = (
                torch.from_numpy(1 / deviation).view(shape).to(device),
                torch.from_numpy(-mean / deviation).view(shape).to(device),
            )
        images = len(sample_shape) == 3
        self._format = torch.channels_last if channels_last and images else None

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        if self._factors is not None:
            values = values * self._factors[0] + self._factors[1]
        if self._format is not None:
            return values.contiguous(memory_format=self._format)
        return values


def given_moments(normalize: Normalize, channels: int) -> Moments | None:
    """The means and deviations written in the job; None for auto and none.

    Raises DataError: not one (or one for all) per channel, or a deviation that is not positive.
    """
    if isinstance(normalize, str):
        return None
    means, deviations = normalize
    for values in (means, deviations):
        if len(values) not in (1, channels):
            raise DataError(
                f"data.normalize: {len(values)} values for {channels} channels; give one for "
                f"each channel, or one for all: [[means], [deviations]]"
            )
    if not (np.isfinite(means).all() and np.isfinite(deviations).all() and min(deviations) > 0):
        raise DataError(
            f"data.normalize: means must be finite and deviations above 0 (given: {normalize})"
        )
    return means, deviations


def channel_moments(images: npt.NDArray[np.uint8], indices: Indices) -> Moments:
    """Mean and standard deviation of each channel, in 0..1, over images[indices] [N, H, W, C].

    Exact sums of whole numbers, chunk by chunk; a deviation is at least 1e-6.
    """
    channels = images.shape[-1]
    total = np.zeros((2, channels))
    for start in range(0, len(indices), _ROWS_PER_CHUNK):
        chunk = images[indices[start : start + _ROWS_PER_CHUNK]]
        values = torch.from_numpy(chunk.reshape(len(chunk), -1)).to(torch.float32)
        for row, sums in enumerate((values.sum(0), values.square_().sum(0))):
            total[row] += sums.double().numpy().reshape(-1, channels).sum(0)
    mean, square = total / (len(indices) * images[0, ..., 0].size)
    deviation = np.sqrt(np.maximum(square - mean**2, 0))
    floor = np.maximum(deviation / 255, _LEAST_DEVIATION)
    return (mean / 255).tolist(), floor.tolist()
