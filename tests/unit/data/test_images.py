"""Decoding and cropping of image files: against torchvision on PIL images."""

from __future__ import annotations

import random
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from raytrain_opt.data import images


def smooth_image(width: int, height: int, mode: str = "RGB") -> Image.Image:
    random = np.random.default_rng(0)
    small = random.integers(64, 192, (6, 8, len(mode)), dtype=np.uint8).squeeze()
    return Image.fromarray(small, mode).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    stream = BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def torchvision_center(content: bytes, size: int) -> torch.Tensor:
    transform = v2.Compose(
        [v2.Resize(round(size * 256 / 224)), v2.CenterCrop(size), v2.PILToTensor()]
    )
    center: torch.Tensor = transform(Image.open(BytesIO(content)).convert("RGB"))
    return center.permute(1, 2, 0)


def mean_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    assert one.shape == other.shape
    assert one.dtype == other.dtype == torch.uint8
    return (one.float() - other.float()).abs().mean().item()


@pytest.mark.parametrize(("width", "height"), [(300, 200), (200, 333), (64, 64)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_the_center_is_that_of_torchvision(kind: str, width: int, height: int) -> None:
    content = encoded(smooth_image(width, height), kind)
    for size in (180, 64):
        expected = torchvision_center(content, size)
        assert mean_difference(images.center_crop(content, size), expected) < 1


def test_a_small_crop_of_a_large_jpeg_is_decoded_to_fewer_pixels() -> None:
    content = encoded(smooth_image(1600, 1200), quality=95)
    reduced = images._decode(content, 100, 100)
    assert reduced.shape[:2] == (150, 200)
    assert images._decode(content, 601, 801).shape[:2] == (1200, 1600)
    # Two ways of averaging the same pixels.
    expected = torchvision_center(content, 96)
    assert mean_difference(images.center_crop(content, 96), expected) < 1


def test_a_random_crop_is_that_of_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(smooth_image(320, 240))
    box = images.Box(31, 47, 150, 170)
    monkeypatch.setattr(images, "draw_box", lambda height, width: box)
    image = Image.open(BytesIO(content))
    crop = v2.functional.resized_crop(image, *box, [96, 96], antialias=True)
    expected = v2.functional.pil_to_tensor(crop).permute(1, 2, 0)
    mirrored = []
    for seed in range(12):
        random.seed(seed)
        result = images.random_crop(content, 96)
        mirrored.append(mean_difference(result, expected) > 1)
        assert mean_difference(result.flip(1) if mirrored[-1] else result, expected) < 1
    assert len(set(mirrored)) == 2


@pytest.mark.parametrize(("height", "width"), [(200, 300), (90, 40), (20, 500), (500, 20)])
def test_boxes_lie_in_the_image(height: int, width: int) -> None:
    random.seed(0)
    boxes = [images.draw_box(height, width) for _ in range(300)]
    for box in boxes:
        assert 0 <= box.top <= box.top + box.height <= height
        assert 0 <= box.left <= box.left + box.width <= width
        assert 0.7 < box.width / box.height < 1.4
    if max(height, width) < 2 * min(height, width):
        areas = [box.height * box.width / (height * width) for box in boxes]
        assert 0.07 < min(areas) < 0.12
        assert max(areas) > 0.8


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_jpegs_of_other_colors_become_rgb(mode: str) -> None:
    content = encoded(smooth_image(80, 60, mode))
    expected = torchvision_center(content, 48)
    assert mean_difference(images.center_crop(content, 48), expected) < 1


def test_a_jpeg_is_readable_where_pil_reads_it() -> None:
    content = encoded(smooth_image(80, 60))
    scan = content.index(b"\xff\xda")
    odd = content[:scan] + b"\x00\x00" + content[scan:]  # extraneous bytes, as in some of ImageNet
    expected = torchvision_center(content, 48)
    assert mean_difference(images.center_crop(odd, 48), expected) < 1
    with pytest.raises(OSError, match="truncated"):
        images.center_crop(content[: len(content) // 2], 48)


@pytest.mark.parametrize("kind", ["uint16", "int32", "float32"])
def test_gray_images_of_more_than_8_bits_are_refused(kind: str) -> None:
    content = encoded(Image.fromarray(np.full((80, 60), 1000, kind)), "TIFF")
    with pytest.raises(ValueError, match="16-bit or float gray image; convert it to 8 bits"):
        images.center_crop(content, 48)


def test_a_jpeg_that_would_fill_the_memory_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(smooth_image(80, 60))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ValueError, match="4,800 pixels, more than 1,000"):
        images.random_crop(content, 48)
