"""Cropping, mirroring and normalising, against literal references, one image at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raytrain_opt.data import order, pixels
from raytrain_opt.errors import DataError

CPU = torch.device("cpu")


def images(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.manual_seed(0))


def literal_crop_and_flip(
    image: np.ndarray, top: int, left: int, flip: bool, padding: int
) -> np.ndarray:
    """torchvision's RandomCrop(size, padding) and RandomHorizontalFlip for given draws."""
    height, width, _ = image.shape
    padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
    cropped = padded[top : top + height, left : left + width]
    return cropped[:, ::-1] if flip else cropped


@pytest.mark.parametrize("shape", [(32, 32, 3), (9, 6, 1), (5, 8, 4)])
@pytest.mark.parametrize(("padding", "flip"), [(4, True), (2, False), (0, True)])
def test_crop_and_flip_is_the_literal_one(
    shape: tuple[int, int, int], padding: int, flip: bool
) -> None:
    batch = images(40, *shape)
    draws = order.draw_crop_flip(0, 0, 0, 40, padding, flip)
    result = pixels.crop_and_flip(batch, draws, padding)
    for i in range(40):
        expected = literal_crop_and_flip(
            batch[i].numpy(), draws.top[i], draws.left[i], draws.flip[i], padding
        )
        np.testing.assert_array_equal(result[i].numpy(), expected)


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
def test_image_scaling(channels: int, channels_last: bool) -> None:
    batch = images(7, 4, 5, channels)
    mean, deviation = [0.1, 0.5, 0.7][:channels], [0.2, 0.3, 0.4][:channels]
    scale = pixels.ImageScaling((mean, deviation), (4, 5, channels), CPU, channels_last)
    result = scale(batch)
    reference = batch.numpy().astype(np.float64) / 255
    reference = ((reference - mean) / deviation).transpose(0, 3, 1, 2)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.numpy(), reference, rtol=1e-5, atol=1e-6)
    wanted = torch.channels_last if channels_last else torch.contiguous_format
    assert result.is_contiguous(memory_format=wanted)


def test_scaling_does_not_depend_on_how_a_batch_is_cut() -> None:
    batch = images(64, 7, 5, 3)
    scale = pixels.ImageScaling(([0.5], [0.3]), (7, 5, 3), CPU, True)
    parts = torch.cat([scale(part) for part in batch.split(3)])
    assert torch.equal(scale(batch), parts)


def test_padding_is_black_before_normalising() -> None:
    white = torch.full((1, 4, 4, 1), 255, dtype=torch.uint8)
    corner = order.CropFlip(np.array([0]), np.array([0]), np.array([False]))
    scale = pixels.ImageScaling(([0.5], [0.5]), (4, 4, 1), CPU, True)
    result = scale(pixels.crop_and_flip(white, corner, 1))[0, 0]
    assert result[0].tolist() == [-1.0] * 4
    assert result[:, 0].tolist() == [-1.0] * 4
    assert (result[1:, 1:] == 1.0).all()


@pytest.mark.parametrize("channels_last", [True, False])
def test_values_stay_or_are_normalised_along_the_first_axis(channels_last: bool) -> None:
    values = torch.rand(6, 2, 3, 3)
    plain = pixels.ValueScaling(None, (2, 3, 3), CPU, channels_last)(values)
    assert torch.equal(plain, values)
    moments = ([0.5, 1.0], [2.0, 4.0])
    scaled = pixels.ValueScaling(moments, (2, 3, 3), CPU, channels_last)(values)
    expected = (values - torch.tensor([0.5, 1.0]).view(2, 1, 1)) / torch.tensor([2.0, 4.0]).view(
        2, 1, 1
    )
    torch.testing.assert_close(scaled, expected)
    wanted = torch.channels_last if channels_last else torch.contiguous_format
    assert plain.is_contiguous(memory_format=wanted)


def test_values_that_are_no_images_are_normalised_too() -> None:
    values = torch.rand(6, 3)
    result = pixels.ValueScaling(([1.0], [2.0]), (3,), CPU, True)(values)
    torch.testing.assert_close(result, (values - 1) / 2)


def test_channel_moments_are_numpys_over_the_chosen_images() -> None:
    batch = images(700, 6, 5, 3).numpy()  # more than one chunk
    chosen = np.arange(1, 700, 2)
    mean, deviation = pixels.channel_moments(batch, chosen)
    reference = batch[chosen].reshape(-1, 3) / 255
    np.testing.assert_allclose(mean, reference.mean(0), rtol=1e-12)
    np.testing.assert_allclose(deviation, reference.std(0), rtol=1e-9)


def test_a_constant_channel_has_a_positive_deviation() -> None:
    batch = np.full((3, 2, 2, 1), 255, np.uint8)
    assert pixels.channel_moments(batch, np.arange(3)) == ([1.0], [1e-6])


@pytest.mark.parametrize(
    ("normalize", "words"),
    [
        (([0.5, 0.5], [1.0] * 3), "2 values for 3 channels"),
        (([0.5], [1.0, 2.0]), "2 values for 3 channels"),
        (([0.5], [0.0]), "deviations above 0"),
        (([float("nan")], [1.0]), "means must be finite"),
    ],
)
def test_wrong_moments_are_refused(normalize: pixels.Normalize, words: str) -> None:
    with pytest.raises(DataError, match=rf"data\.normalize.*{words}"):
        pixels.given_moments(normalize, 3)


def test_words_are_not_moments() -> None:
    assert pixels.given_moments("auto", 3) is None
    assert pixels.given_moments("none", 3) is None
    assert pixels.given_moments(([0.5], [1.0]), 3) == ([0.5], [1.0])
