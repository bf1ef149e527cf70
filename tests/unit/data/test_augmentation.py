"""Policies, mixup, cutmix and repeated augmentation: what they do to a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot

from raytrain_opt.config.data import Augment
from raytrain_opt.config.schema import LossSection
from raytrain_opt.data.base import Batch
from raytrain_opt.data.transforms import Augmentation
from raytrain_opt.errors import DataError
from raytrain_opt.train.task import Classification

SHAPE = (3, 16, 12)


def new_augmentation(
    shape: tuple[int, ...] = SHAPE, is_uint8: bool = True, seed: int = 0, **fields: Any
) -> Augmentation:
    return Augmentation(Augment(**fields), seed, shape, is_uint8=is_uint8)


def numbered_batch(samples: int = 8) -> Batch:
    """Return images whose pixels are all the sample's number, from 1."""
    numbers = torch.arange(1.0, samples + 1)
    return Batch(numbers.view(-1, 1, 1, 1).expand(-1, *SHAPE).contiguous(), torch.arange(samples))


def test_mixup_is_the_weighted_mean_of_samples_and_of_losses() -> None:
    batch, mixup = numbered_batch(), new_augmentation(mixup=0.4)
    weights = []
    for step in range(20):
        mixed = mixup(batch, 1, step)
        expected = mixed.weight * batch.x + (1 - mixed.weight) * batch.x.flip(0)
        torch.testing.assert_close(mixed.x, expected)
        weights.append(mixed.weight)
    assert len(set(weights)) == 20
    assert 0.3 < np.mean(weights) < 0.7
    output = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    labels = one_hot(batch.y, 8).float()
    soft_labels = mixed.weight * labels + (1 - mixed.weight) * labels.flip(0)
    loss = Classification(LossSection()).training_loss(
        torch.nn.Identity(), (output, *mixed.content[1:])
    )
    torch.testing.assert_close(loss, cross_entropy(output, soft_labels))


def test_cutmix_puts_a_box_of_another_sample_and_weighs_by_its_area() -> None:
    batch, cutmix = numbered_batch(), new_augmentation(cutmix=1.0)
    for step in range(20):
        mixed = cutmix(batch, 1, step)
        assert mixed.other_y is not None
        own = mixed.x == batch.x
        assert torch.equal(mixed.x[~own], batch.x.flip(0)[~own])
        assert own.float().mean(dim=(1, 2, 3)).tolist() == pytest.approx([mixed.weight] * 8)
        rows, columns = ((~own[0, 0]).any(dim) for dim in (1, 0))
        assert torch.equal(~own[0, 0], rows[:, None] & columns[None, :])
    assert torch.equal(batch.x, numbered_batch().x)


def test_mixup_and_cutmix_take_turns() -> None:
    both = new_augmentation(mixup=1.0, cutmix=1.0)
    batches = [both(numbered_batch(), 1, step) for step in range(40)]
    are_cut = [bool((batch.x == batch.x.round()).all()) for batch in batches]
    assert 10 < sum(are_cut) < 30


def test_draws_depend_on_seed_epoch_and_step() -> None:
    batch, fields = numbered_batch(), {"mixup": 1.0, "cutmix": 1.0}
    one, other = new_augmentation(**fields), new_augmentation(seed=1, **fields)
    results = [one(batch, 1, 0), one(batch, 1, 1), one(batch, 2, 0)]
    results.append(other(batch, 1, 0))
    assert len({result.x.numpy().tobytes() for result in results}) == 4
    assert torch.equal(one(batch, 1, 0).x, results[0].x)


@pytest.mark.parametrize("policy", ["rand_augment", "trivial_augment"])
def test_a_policy_changes_images_by_their_seeds(policy: str) -> None:
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (6, 16, 12, 3), dtype=torch.uint8, generator=random)
    images = images[:1].expand(6, -1, -1, -1)
    state, augmentation = torch.get_rng_state(), new_augmentation(policy=policy)
    changed = augmentation.apply_policy(images, 0, np.arange(6))
    assert changed.shape == images.shape
    assert len({image.numpy().tobytes() for image in changed}) > 3
    assert torch.equal(augmentation.apply_policy(images[2:4], 0, np.array([2, 3])), changed[2:4])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("shape", "is_uint8", "fields"),
    [
        ((5,), False, {"cutmix": 1.0}),
        ((3, 8, 8), False, {"policy": "rand_augment"}),
        ((2, 8, 8), True, {"policy": "rand_augment"}),
        ((4, 8, 8), True, {"policy": "trivial_augment"}),
    ],
)
def test_settings_for_images_are_refused_for_others(
    shape: tuple[int, ...], is_uint8: bool, fields: dict[str, Any]
) -> None:
    with pytest.raises(DataError, match=rf"data\.augment\.{next(iter(fields))}: needs .*images"):
        new_augmentation(shape, is_uint8, **fields)
    new_augmentation((5,), is_uint8=False, mixup=0.2)
