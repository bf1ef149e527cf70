"""Augmentation beyond crop and mirror: a policy for each image, then erasing and mixing batches.

    x, y    samples and labels of a micro-batch        x', y'   the same in reverse order
    G       the generators of `sampling`: draws depend on seed, epoch e, step t, nothing else

    policy   RandAugment or TrivialAugment of torchvision, on uint8, with the seed of the sample
    erase    row i of the draws of G(s, ERASE, e, t) belongs to the i-th sample of the global batch
    mixup    w x + (1 - w) x',  w ~ Beta(a, a) from G(s, MIX, e, t), one w for each step
    cutmix   x' in a box of x, whose area is 1 - w of the image; if both are on, each half the time
    loss     w loss(output, y) + (1 - w) loss(output, y')

Sources: Cubuk et al., RandAugment, 2020; Müller and Hutter, TrivialAugment, 2021; Zhong et al.,
Random Erasing, 2020; Zhang et al., mixup, 2018; Yun et al., CutMix, 2019. The reverse order as in
timm: with repeated augmentation, neighbors are the same sample. Of the micro-batch, not the global
batch: x' would have to be read on another worker too. So pairs differ with the number of workers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raytrain_opt.config.data import BatchAugment
from raytrain_opt.data.base import Batch
from raytrain_opt.data.batch_reader import isolated_random_state
from raytrain_opt.data.sampling import Indices, Purpose, generator, sample_seed
from raytrain_opt.data.transforms import send
from raytrain_opt.errors import DataError
from raytrain_opt.random_state import seed_all

# Fractions of the image's area, and height / width; the defaults of torchvision and timm.
_ERASED_AREA, _ERASED_LOG_RATIO = (0.02, 1 / 3), math.log(10 / 3)

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
        for field in ("random_erasing", "cutmix"):
            if getattr(section, field) > 0 and len(sample_shape) != 3:
                raise DataError(f"data.augment.{field}", _NEEDS.format(_IMAGES))
        self.policy = _make_policy(section)

    def apply_policy(self, images: torch.Tensor, epoch: int, keys: Indices) -> torch.Tensor:
        """Return images, uint8 [N, H, W, C], each changed with the seed of its key."""
        if self.policy is None:
            return images
        with isolated_random_state():
            changed = []
            for image, key in zip(images, keys, strict=True):
                seed_all(sample_seed(self._seed, Purpose.TRAIN_SAMPLE, epoch, key))
                changed.append(self.policy(image.permute(2, 0, 1)).permute(1, 2, 0))
            return torch.stack(changed)

    def __call__(self, batch: Batch, epoch: int, step: int, rows: slice) -> Batch:
        """Erase and mix a micro-batch: these rows of the step's global batch."""
        batch = self._erase(batch, epoch, step, rows)
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

    def _erase(self, batch: Batch, epoch: int, step: int, rows: slice) -> Batch:
        if not self._section.random_erasing:
            return batch
        height, width = batch.x.shape[-2:]
        draws = generator(self._seed, Purpose.ERASE, epoch, step).random((rows.stop, 5))
        # Unreadable samples are left out of the batch.
        chosen, area, ratio, top, left = draws[rows.start : rows.start + len(batch.y)].T
        area = height * width * (_ERASED_AREA[0] + area * (_ERASED_AREA[1] - _ERASED_AREA[0]))
        ratio = np.exp((2 * ratio - 1) * _ERASED_LOG_RATIO)
        is_erased = chosen < self._section.random_erasing
        in_rows = _spans(top, np.sqrt(area * ratio) * is_erased, height)
        in_columns = _spans(left, np.sqrt(area / ratio), width)
        mask = torch.from_numpy(in_rows[:, :, None] & in_columns[:, None, :])[:, None]
        return replace(batch, x=batch.x.masked_fill(send(mask, batch.x.device), 0))


def _make_policy(section: BatchAugment) -> Any:
    """Return torchvision's transform of one uint8 image [C, H, W]; None for no policy."""
    if section.policy == "none":
        return None
    from torchvision.transforms import v2  # takes seconds to import

    if section.policy == "rand_augment":
        return v2.RandAugment()
    return v2.TrivialAugmentWide()


def _spans(start: Floats, length: Floats, size: int) -> npt.NDArray[np.bool_]:
    """Return [samples, size]: the pixels of spans at uniform positions, `start` in 0..1."""
    length = np.minimum(np.round(length), size)
    first = np.floor(start * (size - length + 1))
    pixels = np.arange(size)
    is_inside: npt.NDArray[np.bool_] = (pixels >= first[:, None]) & (
        pixels < (first + length)[:, None]
    )
    return is_inside


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
