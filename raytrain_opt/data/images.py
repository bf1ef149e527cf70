"""Decode an image file, turn it upright, and crop it to the size of the model.

    h, w    pixels of the crop in the original image         s    pixels of the result, per side
    a       fraction of the image's area, uniform in [0.08, 1]
    r       ratio w / h, log-uniform in [3/4, 4/3]; both drawn by torchvision

JPEG files are decoded by libjpeg-turbo (simplejpeg), with 1/2 to 1/8 of the pixels per side where
the crop still has at least s of them. Everything else, and what libjpeg-turbo rejects, is decoded
by PIL and then reduced in the same way. The orientation that EXIF states is applied. The crop is
resized with antialiasing, as torchvision's transforms of tensors do.
Source: Szegedy et al., Going Deeper with Convolutions, CVPR 2015 (the random crop).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import simplejpeg
import torch
from PIL import ExifTags, Image
from torch.nn.functional import interpolate

from raytrain_opt.storage import read_file

Pixels = npt.NDArray[np.uint8]

# The usual evaluation crop: 224 pixels out of a shorter side of 256.
_RESIZE_RATIO = 256 / 224
_AREA, _RATIO = [0.08, 1.0], [3 / 4, 4 / 3]
# Files of a folder that are taken for images, as in torchvision.
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
# Pillow knows more than forty formats, and starts Ghostscript for one of them.
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
# Decoding takes up to 8 bytes a pixel, of WebP 16: 256 MiB, whatever a small file expands to. JPEG
# files that are not progressive are decoded line by line, and reduced meanwhile.
_MAX_PIXELS, _MAX_BASELINE_PIXELS = 2**25, 85 * 2**20
_MAX_BYTES = 2**28


class ImageError(ValueError):
    """An image file cannot be read; the message is the reason, in words for people."""


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


@contextmanager
def _decoder_errors() -> Iterator[None]:
    """Raise an ImageError for what a decoder raises: a damaged file can raise anything."""
    try:
        yield
    except ImageError:
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ImageError(reason or type(error).__name__) from error


@_decoder_errors()
def read_image_file(path: str | Path) -> bytes:
    """Return the content of an image file. Raises ImageError."""
    return read_file(Path(path), _MAX_BYTES)


@_decoder_errors()
def random_crop(content: bytes, size: int) -> torch.Tensor:
    """Return a random crop of an image file, resized and mirrored with probability 0.5.

    uint8 [size, size, 3]; draws from torch's and Python's random numbers. Raises ImageError.
    """
    from torchvision.transforms import RandomResizedCrop  # not at the top: this takes a second

    image = _ImageFile(content)
    shape = torch.empty(image.height, image.width, device="meta")
    box = Box(*RandomResizedCrop.get_params(shape, _AREA, _RATIO))
    pixels = _resized(image, box, (size, size))
    return pixels.flip(1) if random.random() < 0.5 else pixels


@_decoder_errors()
def center_crop(content: bytes, size: int) -> torch.Tensor:
    """Return the center of an image file, uint8 [size, size, 3]. Raises ImageError."""
    image = _ImageFile(content)
    side, short = round(size * _RESIZE_RATIO), min(image.height, image.width)
    shape = (side * image.height // short, side * image.width // short)
    pixels = _resized(image, Box(0, 0, image.height, image.width), shape)
    top, left = (round((length - size) / 2) for length in shape)
    return pixels[top : top + size, left : left + size]


@_decoder_errors()
def stretch(content: bytes, height: int, width: int) -> torch.Tensor:
    """Return all of an image file, uint8 [height, width, 3]. Raises ImageError."""
    image = _ImageFile(content)
    return _resized(image, Box(0, 0, image.height, image.width), (height, width))


def open_image(content: bytes) -> Image.Image:
    """Read the header of an image file. Raises ImageError."""
    try:
        image = Image.open(BytesIO(content), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(f"decoding would fill memory: {error}") from error
    except Exception as error:
        reason = f"it is not an image ({', '.join(FORMATS)}), or cut off within its header"
        raise ImageError(reason) from error
    is_baseline = image.format in ("JPEG", "MPO") and "progressive" not in image.info
    limit = _MAX_PIXELS // 2 if image.format == "WEBP" else _MAX_PIXELS
    limit = _MAX_BASELINE_PIXELS if is_baseline else limit
    if image.width * image.height > limit:
        pixels = f"{image.width * image.height:,} pixels, more than {limit:,}"
        raise ImageError(f"{pixels}: decoding would fill memory; make it smaller")
    return image


class _ImageFile:
    """An image file whose pixels are decoded when needed; `height` and `width`: upright."""

    def __init__(self, content: bytes) -> None:
        self._content, self._image = content, open_image(content)
        if self._image.format != "JPEG":
            self._image.load()  # a PNG file may have its orientation last; TIFF is turned
        self._orientation = _orientation(self._image)
        shape = self._image.height, self._image.width
        self.height, self.width = shape if self._orientation < 5 else shape[::-1]

    def decode(self, min_height: int, min_width: int) -> Pixels:
        """Return [height, width, 3], perhaps fewer pixels than in the file, but at least these."""
        turn = self._orientation
        if turn < 5:
            pixels = self._decode(min_height, min_width)
        else:
            pixels = self._decode(min_width, min_height).transpose(1, 0, 2)
        pixels = pixels[::-1] if turn in (3, 4, 7, 8) else pixels
        return pixels[:, ::-1] if turn in (2, 3, 6, 7) else pixels

    def _decode(self, min_height: int, min_width: int) -> Pixels:
        image = self._image
        if image.format == "JPEG":
            smallest = {"min_height": min_height, "min_width": min_width}
            with suppress(Exception):  # four color channels, or damage: PIL decides
                # Factors below 2 take longer to decode than the complete image.
                pixels: Pixels = simplejpeg.decode_jpeg(self._content, min_factor=2, **smallest)
                return pixels
        if image.mode[0] in "IF":  # cut off at 255 by Pillow: all white
            raise ImageError("16-bit or float gray image; convert it to 8 bits")
        image.draft(None, (min_width, min_height))  # reduces a JPEG file while it is decoded
        image = image if image.mode == "RGB" else image.convert("RGB")
        # Twice the pixels remain, which hardly shows; a large image then takes less memory.
        factor = min(image.height // (2 * min_height), image.width // (2 * min_width))
        return np.asarray(image.reduce(factor) if factor > 1 else image)


def _orientation(image: Image.Image) -> int:
    """Return the orientation that EXIF or XMP states, 1 to 8; 1 is upright."""
    with suppress(Exception):  # damaged EXIF: the pixels may be whole
        value = image.getexif().get(ExifTags.Base.Orientation)
        return int(value) if value is not None and value in range(1, 9) else 1
    return 1


def _resized(image: _ImageFile, box: Box, shape: tuple[int, int]) -> torch.Tensor:
    """Return the box of the upright image, resized to [*shape, 3]."""
    min_height = math.ceil(image.height * shape[0] / box.height)
    pixels = image.decode(min_height, math.ceil(image.width * shape[1] / box.width))
    rows, columns = (
        slice(int(start * scale), max(1, round(length * scale)) + int(start * scale))
        for start, length, scale in (
            (box.top, box.height, pixels.shape[0] / image.height),
            (box.left, box.width, pixels.shape[1] / image.width),
        )
    )
    # As a batch of one, contiguous in channels_last, torch resizes it three times as fast.
    crop = torch.from_numpy(np.require(pixels[rows, columns], None, ["C", "W"])[np.newaxis])
    resized = interpolate(crop.permute(0, 3, 1, 2), shape, mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0)
