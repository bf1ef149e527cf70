"""Data in memory: the batches do not depend on the process that reads them or on the order."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from raytrain_opt.config.data import ArraysData, ArraySetData, Augment, HoldOut
from raytrain_opt.data.in_memory import InMemoryData, SampleStore
from raytrain_opt.data.in_memory_sets import DatasetArrays
from raytrain_opt.errors import DataError

CPU = torch.device("cpu")
CIFAR = ArraySetData(name="cifar10", normalize="none")
FILES = ArraysData(name="arrays", train=("x", "y"), test=("x", "y"), normalize="none")


def numbered_images(train: int = 53, test: int = 11) -> DatasetArrays:
    """Return read-only 6x6x3 images; sample i has label i, so labels identify samples."""
    random = np.random.default_rng(0)
    x = random.integers(1, 256, (train + test, 6, 6, 3), dtype=np.uint8)
    y = np.r_[np.arange(train), np.arange(test)]
    x.flags.writeable = y.flags.writeable = False
    return DatasetArrays(x[:train], y[:train], x[train:], y[train:], max(train, test))


TENTH = HoldOut(0.1)


def open_arrays(
    section: ArraySetData | ArraysData = CIFAR,
    arrays: DatasetArrays | None = None,
    seed: int = 0,
    channels_last: bool = True,
    hold_out: HoldOut = TENTH,
) -> InMemoryData:
    return InMemoryData(
        arrays or numbered_images(),
        section,
        hold_out=hold_out,
        seed=seed,
        device=CPU,
        channels_last=channels_last,
    )


def test_a_balanced_epoch_of_arrays() -> None:
    y = np.repeat([0, 1], [50, 3])
    arrays = replace(numbered_images(), train_y=y, test_y=y[:11], num_classes=2)
    section = CIFAR.model_copy(update={"sampler": "balanced"})
    data = open_arrays(section, arrays, hold_out=HoldOut(0.0))
    assert data.info.class_counts == (50, 3)
    _, labels = read_epoch(data, 0, 1)
    assert abs(int(labels.sum()) - 24) <= 6  # 48 of 53 samples are in full batches
    assert torch.equal(labels, read_epoch(data, 0, 2)[1])


@pytest.mark.parametrize(("section", "field"), [(CIFAR, "data.name"), (FILES, "data.train.1")])
def test_a_class_without_training_samples_is_an_error(section: Any, field: str) -> None:
    arrays = replace(numbered_images(), num_classes=60, field=field)
    with pytest.raises(DataError, match=rf"{field}: .* class 53, 54, .* of its 60 classes"):
        open_arrays(section, arrays)


def read_epoch(
    data: InMemoryData, epoch: int, num_micro_batches: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and y of an epoch of global batches of 8."""
    steps = range(data.info.steps_per_epoch(8))
    batches = list(
        data.train_batches(epoch, product(steps, range(num_micro_batches)), num_micro_batches, 8)
    )
    return torch.cat([b.x for b in batches]), torch.cat([b.y for b in batches])


def test_auto_normalizes_by_the_training_split() -> None:
    section = FILES.model_copy(update={"normalize": "auto"})
    data = open_arrays(section, numbered_images(train=48), hold_out=HoldOut(0.5))
    x = read_epoch(data, 0, 1)[0]
    assert x.dtype == torch.float32
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std((0, 2, 3), correction=0), torch.ones(3))


def float_arrays() -> DatasetArrays:
    x = np.random.default_rng(0).random((20, 5), dtype=np.float32)
    x.flags.writeable = False
    return DatasetArrays(x, np.arange(20), x, np.arange(20), 20)


@pytest.mark.parametrize("augment", [Augment(crop_padding=1), Augment(flip=True)])
def test_augmenting_float_arrays_is_an_error(augment: Augment) -> None:
    with pytest.raises(DataError, match=r"data\.augment: crop and flip need uint8 images"):
        open_arrays(FILES.model_copy(update={"augment": augment}), float_arrays())


@pytest.mark.parametrize(("name", "augmented"), [("cifar10", True), ("mnist", False)])
def test_only_cifar_is_augmented_by_default(name: str, augmented: bool) -> None:
    arrays, section = numbered_images(), ArraySetData(name=name, normalize="none")
    batch = next(open_arrays(section, arrays).train_batches(0, [(0, 0)], 1, 8))
    plain = torch.from_numpy(arrays.train_x[batch.y.numpy()]).permute(0, 3, 1, 2) / 255
    assert torch.allclose(batch.x, plain) != augmented


@pytest.mark.parametrize("held_out", [2, 5])
def test_others_take_the_place_of_samples_that_an_epoch_holds_out(held_out: int) -> None:
    """Without a validation split of its own, as a replay has none, too."""
    data, other = (
        open_arrays(hold_out=HoldOut(fraction, only_in_search=True)) for fraction in (0.1, 0.0)
    )
    validation = {int(y) for b in data.eval_batches("validation", 0, 1, 5) for y in b.y}
    whole, epoch, replayed = (
        torch.cat(
            [b.y for b in d.train_batches(2, product(range(1), range(1)), 1, 53, held_out=n)]
        )
        for d, n in ((data, 0), (data, held_out), (other, held_out))
    )
    assert torch.equal(epoch, replayed)
    changed = whole != epoch
    assert changed.sum() == held_out
    left_out = set(whole[changed].tolist())
    assert left_out <= validation
    assert not left_out & set(epoch.tolist())
    assert torch.bincount(epoch).max() == 2


def test_samples_are_the_same_in_the_devices_memory() -> None:
    arrays, indices = numbered_images(train=5000), np.array([4999, 0, 4096, 7])
    copies: list[str] = []
    (x, y), (x2, y2) = (
        SampleStore(arrays.train_x, arrays.train_y, CPU, on_device=on_device).take(
            indices, lambda: copies.append("copy")
        )
        for on_device in (False, True)
    )
    assert copies == ["copy", "copy"]
    np.testing.assert_array_equal(x.numpy(), arrays.train_x[indices])
    assert torch.equal(x, x2)
    assert torch.equal(y, y2)
