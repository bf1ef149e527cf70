"""Crop, mirror and normalize, compared with plain references that handle one image at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raytrain_opt.data import sampling, transforms
from raytrain_opt.data.transforms import Preprocessing
from raytrain_opt.errors import DataError

CPU = torch.device("cpu")


def images(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.manual_seed(0))


def reference_crop_and_flip(
    image: np.ndarray, top: int, left: int, flip: bool, padding: int
) -> np.ndarray:
    """Do what torchvision's RandomCrop(size, padding) and RandomHorizontalFlip do."""
    height, width, _ = image.shape
    padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
    cropped = padded[top : top + height, left : left + width]
    return cropped[:, ::-1] if flip else cropped


@pytest.mark.parametrize("shape", [(32, 32, 3), (9, 6, 1), (5, 8, 4)])
@pytest.mark.parametrize(("padding", "flip"), [(4, True), (2, False), (0, True)])
def test_crop_and_flip_equals_the_reference(
    shape: tuple[int, int, int], padding: int, flip: bool
) -> None:
    batch = images(40, *shape)
    draws = sampling.draw_crop_flip(0, 0, 0, slice(40), padding, flip)
    result = transforms.crop_and_flip(batch, draws, padding)
    for i in range(40):
        expected = reference_crop_and_flip(
            batch[i].numpy(), draws.top[i], draws.left[i], draws.flip[i], padding
        )
        np.testing.assert_array_equal(result[i].numpy(), expected)


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_normalized(channels: int, channels_last: bool) -> None:
    batch = images(7, 4, 5, channels)
    mean, std = [0.1, 0.5, 0.7][:channels], [0.2, 0.3, 0.4][:channels]
    shown = Preprocessing(is_image=True, mean_std=(mean, std))
    result = transforms.make_transform(shown, (channels, 4, 5), CPU, channels_last)(batch)
    reference = batch.numpy().astype(np.float64) / 255
    reference = ((reference - mean) / std).transpose(0, 3, 1, 2)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.numpy(), reference, rtol=1e-5, atol=1e-6)
    expected_format = torch.channels_last if channels_last else torch.contiguous_format
    assert result.is_contiguous(memory_format=expected_format)


@pytest.mark.parametrize("channels_last", [True, False])
def test_values_are_unchanged_or_normalized_along_the_first_axis(channels_last: bool) -> None:
    values = torch.rand(6, 2, 3, 3)
    before = values.clone()
    plain, scaled = (
        transforms.make_transform(Preprocessing(False, v), (2, 3, 3), CPU, channels_last)(values)
        for v in (None, ([0.5, 1.0], [2.0, 4.0]))
    )
    assert torch.equal(plain, before)
    mean, std = (torch.tensor(v).view(2, 1, 1) for v in ([0.5, 1.0], [2.0, 4.0]))
    torch.testing.assert_close(scaled, (before - mean) / std)
    assert torch.equal(values, before)
    expected_format = torch.channels_last if channels_last else torch.contiguous_format
    assert plain.is_contiguous(memory_format=expected_format)


def test_mean_and_std_of_channels_equal_numpys() -> None:
    batch = images(700, 6, 5, 3).numpy()  # more than one chunk
    indices = np.arange(1, 700, 2)
    mean, std = transforms.channel_mean_std(batch, indices)
    reference = batch[indices].reshape(-1, 3) / 255
    np.testing.assert_allclose(mean, reference.mean(0), rtol=1e-12)
    np.testing.assert_allclose(std, reference.std(0), rtol=1e-9)


@pytest.mark.parametrize(
    ("normalize", "message"),
    [
        (([0.5, 0.5], [1.0] * 3), "2 values for 3 channels"),
        (([0.5], [1.0, 2.0]), "2 values for 3 channels"),
        (([0.5], [0.0]), "standard deviations above 0"),
        (([float("nan")], [1.0]), "means must be finite"),
    ],
)
def test_a_wrong_mean_or_std_is_an_error(
    normalize: transforms.NormalizeSetting, message: str
) -> None:
    with pytest.raises(DataError, match=rf"data\.normalize.*{message}"):
        transforms.resolve_preprocessing(normalize, (3, 8, 8), True, None)
