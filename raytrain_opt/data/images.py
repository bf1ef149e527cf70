"""Decode an image file and crop it to the size of the model.

    h, w    pixels of the crop in the original image         s    pixels of the result, per side
    a       fraction of the image's area, uniform in [0.08, 1]
    r       ratio w / h, log-uniform in [3/4, 4/3]

JPEG files are decoded by libjpeg-turbo (simplejpeg), with 1/2 to 1/8 of the pixels per side where
the crop still has at least s of them: the decoder then computes fewer. Everything else, and what
libjpeg-turbo rejects, is decoded by PIL. The crop is resized with antialiasing, as torchvision's
transforms of tensors do.
Source: Szegedy et al., Going Deeper with Convolutions, CVPR 2015 (the random crop).
"""

from __future__ import annotations

import math
import random
from io import BytesIO
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import simplejpeg
import torch
from PIL import Image
from torch.nn.functional import interpolate

Pixels = npt.NDArray[np.uint8]

# The usual evaluation crop: 224 pixels out of a shorter side of 256.
_RESIZE_RATIO = 256 / 224
_AREA, _LOG_RATIO = (0.08, 1.0), (math.log(3 / 4), math.log(4 / 3))
# Draws until a crop fits into the image, as in torchvision.
_MAX_DRAWS = 10


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def random_crop(content: bytes, size: int) -> torch.Tensor:
    """Return a random crop of an image file, resized and mirrored with probability 0.5.

    uint8 [size, size, 3]; draws from Python's random numbers. Raises the decoder's errors.
    """
    height, width = _image_size(content)
    pixels = _resized(content, draw_box(height, width), (size, size))
    return pixels.flip(1) if random.random() < 0.5 else pixels


def center_crop(content: bytes, size: int) -> torch.Tensor:
    """Return the center of an image file, uint8 [size, size, 3]. Raises the decoder's errors."""
    height, width = _image_size(content)
    side, short = round(size * _RESIZE_RATIO), min(height, width)
    shape = (side * height // short, side * width // short)
    pixels = _resized(content, Box(0, 0, height, width), shape)
    top, left = (round((length - size) / 2) for length in shape)
    return pixels[top : top + size, left : left + size]


def stretch(content: bytes, height: int, width: int) -> torch.Tensor:
    """Return all of an image file, uint8 [height, width, 3]. Raises the decoder's errors."""
    return _resized(content, Box(0, 0, *_image_size(content)), (height, width))


def draw_box(height: int, width: int) -> Box:
    """Draw a crop as torchvision does; the largest in the middle if none fits."""
    for _ in range(_MAX_DRAWS):
        area = height * width * random.uniform(*_AREA)
        ratio = math.exp(random.uniform(*_LOG_RATIO))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            top = random.randint(0, height - box_height)
            left = random.randint(0, width - box_width)
            return Box(top, left, box_height, box_width)
    low, high = (math.exp(ratio) for ratio in _LOG_RATIO)
    box_width, box_height = min(width, round(height * high)), min(height, round(width / low))
    top, left = (height - box_height) // 2, (width - box_width) // 2
    return Box(top, left, box_height, box_width)


def _image_size(content: bytes) -> tuple[int, int]:
    """Return height and width. Raises ValueError for an image that would fill the memory."""
    if _is_jpeg(content):
        height, width, *_ = simplejpeg.decode_jpeg_header(content, strict=False)
    else:
        with Image.open(BytesIO(content)) as image:
            width, height = image.size
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and height * width > limit:  # PIL itself only warns up to twice of it
        raise ValueError(
            f"{height * width:,} pixels, more than {limit:,}: decoding would fill memory"
        )
    return height, width


def _is_jpeg(content: bytes) -> bool:
    return content.startswith(b"\xff\xd8\xff")


def _decode(content: bytes, min_height: int, min_width: int) -> Pixels:
    """Return [height, width, 3], perhaps of fewer pixels than the file, but at least these."""
    if _is_jpeg(content):
        smallest = {"min_height": min_height, "min_width": min_width}
        try:
            # Factors below 2 take longer to decode than the complete image.
            pixels: Pixels = simplejpeg.decode_jpeg(content, min_factor=2, **smallest)
            return pixels
        except ValueError:
            pass  # four color channels, or damage: PIL decides whether it can be read
    with Image.open(BytesIO(content)) as image:
        if image.mode[0] in "IF":  # cut off at 255 by Pillow: all white
            raise ValueError("16-bit or float gray image; convert it to 8 bits")
        return np.array(image.convert("RGB"))


def _resized(content: bytes, box: Box, shape: tuple[int, int]) -> torch.Tensor:
    """Return the box of an image file, resized to [*shape, 3]."""
    height, width = _image_size(content)
    min_height = math.ceil(height * shape[0] / box.height)
    pixels = _decode(content, min_height, math.ceil(width * shape[1] / box.width))
    rows, columns = (
        slice(int(start * scale), max(1, round(length * scale)) + int(start * scale))
        for start, length, scale in (
            (box.top, box.height, pixels.shape[0] / height),
            (box.left, box.width, pixels.shape[1] / width),
        )
    )
    # As a batch of one, contiguous in channels_last, torch resizes it three times as fast.
    crop = torch.from_numpy(np.ascontiguousarray(pixels[rows, columns])[np.newaxis])
    resized = interpolate(crop.permute(0, 3, 1, 2), shape, mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0)
