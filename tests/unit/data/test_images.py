"""Decoding and cropping of image files: against torchvision on PIL images."""

from __future__ import annotations

import os
import random
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision.transforms import RandomResizedCrop, v2

from raytrain_opt.data import images
from raytrain_opt.random_state import seed_all


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
    image = images._ImageFile(content)
    assert image.decode(100, 100).shape[:2] == (150, 200)
    assert image.decode(601, 801).shape[:2] == (1200, 1600)
    # Two ways of averaging the same pixels.
    expected = torchvision_center(content, 96)
    assert mean_difference(images.center_crop(content, 96), expected) < 1


def test_a_random_crop_is_that_of_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(smooth_image(320, 240))
    box = images.Box(31, 47, 150, 170)
    boxes = {torch.Size([240, 320]): box}
    monkeypatch.setattr(RandomResizedCrop, "get_params", lambda shape, *_: boxes[shape.shape])
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


def test_a_jpeg_is_readable_where_pil_reads_it() -> None:
    content = encoded(smooth_image(80, 60))
    scan = content.index(b"\xff\xda")
    odd = content[:scan] + b"\x00\x00" + content[scan:]  # extraneous bytes, as in some of ImageNet
    expected = torchvision_center(content, 48)
    assert mean_difference(images.center_crop(odd, 48), expected) < 1
    with pytest.raises(images.ImageError, match="truncated"):
        images.center_crop(content[: len(content) // 2], 48)


@pytest.mark.parametrize("kind", ["uint16", "int32", "float32"])
def test_gray_images_of_more_than_8_bits_are_refused(kind: str) -> None:
    content = encoded(Image.fromarray(np.full((80, 60), 1000, kind)), "TIFF")
    with pytest.raises(ValueError, match="16-bit or float gray image; convert it to 8 bits"):
        images.center_crop(content, 48)


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


@pytest.mark.parametrize(
    ("kind", "orientation"),
    [*(("JPEG", n) for n in range(10)), *product(["MPO", "PNG", "TIFF", "WEBP"], [6, 7])],
)
def test_images_stand_upright(kind: str, orientation: int) -> None:
    """Also where the decoder reduces (90 of 300 pixels), and for a part of the image."""
    options = {"lossless": True} if kind == "WEBP" else {}
    options |= {"save_all": True, "append_images": []} if kind == "MPO" else {}
    content = encoded(smooth_image(400, 300), kind, exif=turned(orientation), **options)
    upright = encoded(ImageOps.exif_transpose(Image.open(BytesIO(content))), "PNG")
    for size in (78, 200):
        center = images.center_crop(content, size)
        assert mean_difference(center, torchvision_center(upright, size)) < 1
    assert mean_difference(images.stretch(content, 50, 90), images.stretch(upright, 50, 90)) < 1
    pair = []
    for file in (content, upright):
        seed_all(3)
        pair.append(images.random_crop(file, 64))
    assert mean_difference(*pair) < 4  # JPEG was reduced; a wrong turn makes more than 10


def test_an_orientation_in_xmp_is_applied_and_damaged_exif_is_not() -> None:
    xmp = b'<rdf:Description tiff:Orientation="6"/>'
    size = images._ImageFile(encoded(smooth_image(80, 60), xmp=xmp))
    assert (size.height, size.width) == (80, 60)
    broken = encoded(smooth_image(80, 60), exif=b"Exif\0\0MM\0*\xff\xff")
    assert images.center_crop(broken, 48).shape == (48, 48, 3)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        *[("RGB", {"subsampling": ratio}) for ratio in ("4:4:4", "4:2:2", "4:2:0", "4:1:1")],
        *[(mode, {"progressive": True}) for mode in ("RGB", "L", "CMYK")],
    ],
)
def test_jpegs_of_every_kind_are_read(mode: str, options: dict[str, Any]) -> None:
    content = encoded(smooth_image(83, 61, mode), **options)
    assert mean_difference(images.center_crop(content, 48), torchvision_center(content, 48)) < 2


@pytest.mark.parametrize("error", [ValueError("subsampling"), KeyError(6)])
def test_what_the_fast_decoder_refuses_is_read_by_pil(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own errors for 4:1:0 and 4:4:1, which Pillow cannot write."""

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    content = encoded(smooth_image(400, 300))
    for name in ("decode_jpeg", "decode_jpeg_header"):
        monkeypatch.setattr(f"simplejpeg.{name}", refuse)
    assert mean_difference(images.center_crop(content, 80), torchvision_center(content, 80)) < 1


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
JPEG, PNG = encoded(smooth_image(80, 60)), encoded(smooth_image(80, 60), "PNG")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is not an image"),
        (b"<html>not found</html>", "it is not an image"),
        (bytes(1000), "it is not an image"),
        (EPS, "it is not an image"),
        (encoded(smooth_image(9, 9), "GIF"), "it is not an image"),
        *[(JPEG[:size], "cut off within its header") for size in (2, 3, 20, 100, 300)],
        *[(PNG[:size], "cut off within its header") for size in (4, 8, 20)],
        (PNG[:200], "truncated|broken"),
        (JPEG[:-200], "truncated"),
    ],
)
def test_the_reason_says_what_is_wrong_with_the_file(content: bytes, reason: str) -> None:
    crops = (images.center_crop, images.random_crop, lambda c, size: images.stretch(c, size, size))
    for crop in crops:
        with pytest.raises(images.ImageError, match=reason) as caught:
            crop(content, 48)
        assert "BytesIO" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "options", "limit"),
    [
        *[(kind, {}, "1,000") for kind in ("PNG", "TIFF", "BMP")],
        ("WEBP", {}, "500"),
        ("JPEG", {}, "2,000"),
        ("JPEG", {"progressive": True}, "1,000"),
    ],
)
def test_an_image_that_would_fill_the_memory_is_not_decoded(
    kind: str, options: Any, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JPEG files that are decoded line by line may be larger."""
    content = encoded(smooth_image(80, 60), kind, **options)
    assert images.random_crop(content, 48).shape == (48, 48, 3)
    monkeypatch.setattr(images, "_MAX_PIXELS", 1000)
    monkeypatch.setattr(images, "_MAX_BASELINE_PIXELS", 2000)
    with pytest.raises(images.ImageError, match=f"4,800 pixels, more than {limit}"):
        images.random_crop(content, 48)


def test_only_plain_files_of_bounded_size_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    os.mkfifo(tmp_path / "b.png")
    (tmp_path / "c.png").symlink_to("/dev/zero")
    assert images.read_image_file(tmp_path / "a.png") == PNG
    for name in "bc":
        with pytest.raises(images.ImageError, match="not a plain file"):
            images.read_image_file(tmp_path / f"{name}.png")
    monkeypatch.setattr(images, "_MAX_BYTES", 100)
    with pytest.raises(images.ImageError, match="has more than 100 bytes"):
        images.read_image_file(tmp_path / "a.png")
