"""Batches from arrays in memory: the same samples for whoever asks, in whatever order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from raytrain_opt.config.schema import ArraysData, ArraySetData, Augment
from raytrain_opt.data import load_shared, open_data, order
from raytrain_opt.data.arrays import ArrayData, Arrays, DeviceStore, HostStore
from raytrain_opt.errors import DataError

CPU = torch.device("cpu")
CIFAR = ArraySetData(name="cifar10", normalize="none")
FILES = ArraysData(name="arrays", train=("x", "y"), test=("x", "y"), normalize="none")


def numbered(train: int = 53, test: int = 11) -> Arrays:
    """Read-only 6x6x3 images; sample i has the label i, so that labels tell which it is."""
    random = np.random.default_rng(0)
    x = random.integers(1, 256, (train + test, 6, 6, 3), dtype=np.uint8)
    y = np.r_[np.arange(train), np.arange(test)]
    x.flags.writeable = y.flags.writeable = False
    return Arrays(x[:train], y[:train], x[train:], y[train:], max(train, test))


def opened(
    section: ArraySetData | ArraysData = CIFAR,
    arrays: Arrays | None = None,
    seed: int = 0,
    channels_last: bool = True,
) -> ArrayData:
    return ArrayData(
        arrays or numbered(), section, seed=seed, device=CPU, channels_last=channels_last
    )


def whole(data: ArrayData, epoch: int, num_shares: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An epoch of global batches of 8, as one tensor."""
    steps = range(data.info.steps_per_epoch(8))
    batches = list(data.train(epoch, steps, range(num_shares), num_shares, 8))
    return torch.cat([b.x for b in batches]), torch.cat([b.y for b in batches])


def test_info() -> None:
    info = opened().info
    assert (info.train_size, info.selection_size, info.test_size) == (48, 5, 11)
    assert info.sample_shape == (3, 6, 6)
    assert info.num_classes == 53
    assert info.steps_per_epoch(8) == 6
    assert info.steps_per_epoch(10) == 4
    assert info.steps_per_epoch(49) == 0


@pytest.mark.parametrize("num_shares", [1, 2, 4])
def test_an_epoch_has_every_training_sample_once(num_shares: int) -> None:
    data = opened()
    selection = [int(y) for b in data.evaluate("selection", 0, 1, 4) for y in b.y]
    labels = whole(data, 0, num_shares)[1].tolist()
    assert len(selection) == 5
    assert sorted(labels + selection) == list(range(53))


@pytest.mark.parametrize("num_shares", [2, 4, 8])
def test_the_number_of_shares_changes_no_bit(num_shares: int) -> None:
    data = opened(CIFAR.model_copy(update={"normalize": "auto"}))
    one_x, one_y = whole(data, 1, 1)
    x, y = whole(data, 1, num_shares)
    assert torch.equal(one_y, y)
    assert torch.equal(one_x, x)


def test_workers_with_one_share_each_see_what_one_process_sees() -> None:
    data = opened()
    alone = list(data.train(0, range(3), range(2), 2, 8))
    workers = [list(opened().train(0, range(3), range(r, r + 1), 2, 8)) for r in range(2)]
    for step in range(3):
        for rank in range(2):
            assert torch.equal(alone[2 * step + rank].x, workers[rank][step].x)
            assert torch.equal(alone[2 * step + rank].y, workers[rank][step].y)


def test_any_phase_can_be_repeated_in_any_order() -> None:
    data = opened()
    first = list(data.train(0, range(6), range(1), 1, 8))
    for _ in data.evaluate("test", 0, 1, 4):
        list(data.train(3, range(2), range(1), 1, 8))
    again = [next(data.train(0, range(s, s + 1), range(1), 1, 8)) for s in reversed(range(6))]
    for one, two in zip(first, reversed(again), strict=True):
        assert torch.equal(one.x, two.x)
        assert torch.equal(one.y, two.y)


def test_epochs_and_seeds_differ() -> None:
    data = opened()
    orders = [whole(data, epoch, 1)[1].tolist() for epoch in (0, 1)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])
    assert whole(opened(seed=1), 0, 1)[1].tolist() != orders[0]


def test_the_selection_split_is_never_trained_on() -> None:
    data = opened(seed=7)
    selection = {int(y) for b in data.evaluate("selection", 0, 1, 4) for y in b.y}
    seen = {int(y) for epoch in range(5) for y in whole(data, epoch, 2)[1]}
    assert selection.isdisjoint(seen)
    assert selection | seen == set(range(53))


@pytest.mark.parametrize(("split", "size"), [("selection", 5), ("test", 11)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 13])
def test_evaluation_counts_each_sample_once(split: str, size: int, world_size: int) -> None:
    arrays = numbered()
    data = opened(arrays=arrays)
    labels = []
    for rank in range(world_size):
        for batch in data.evaluate(split, rank, world_size, 4):  # type: ignore[arg-type]
            assert 1 <= len(batch.y) <= 4
            source = arrays.train_x if split == "selection" else arrays.test_x
            plain = torch.from_numpy(source[batch.y.numpy()]).permute(0, 3, 1, 2) / 255
            torch.testing.assert_close(batch.x, plain)  # no augmentation
            labels += batch.y.tolist()
    assert len(labels) == size
    assert len(set(labels)) == size


def test_training_images_are_cropped_and_mirrored_as_drawn() -> None:
    arrays = numbered()
    batch = next(opened(arrays=arrays).train(2, range(3, 4), range(1), 1, 8))
    draws = order.draw_crop_flip(0, 2, 3, 8, 4, True)
    assert draws.flip.any()
    assert not draws.flip.all()
    for i, label in enumerate(batch.y.tolist()):
        padded = np.pad(arrays.train_x[label], ((4, 4), (4, 4), (0, 0)))
        image = padded[draws.top[i] :, draws.left[i] :][:6, :6]
        image = image[:, ::-1] if draws.flip[i] else image
        expected = torch.from_numpy(image.copy()).permute(2, 0, 1) / 255
        torch.testing.assert_close(batch.x[i], expected)


def test_auto_normalises_by_the_training_part() -> None:
    section = FILES.model_copy(update={"normalize": "auto", "selection_fraction": 0.5})
    data = opened(section, numbered(train=48))
    x = whole(data, 0, 1)[0]
    assert x.dtype == torch.float32
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std((0, 2, 3), correction=0), torch.ones(3))


def test_given_moments_apply_to_values_scaled_to_one() -> None:
    arrays = numbered()
    section = FILES.model_copy(update={"normalize": ([0.5], [0.25])})
    batch = next(opened(section, arrays).evaluate("test", 0, 1, 11))
    expected = (torch.from_numpy(arrays.test_x.copy()).permute(0, 3, 1, 2) / 255 - 0.5) / 0.25
    torch.testing.assert_close(batch.x, expected)


@pytest.mark.parametrize("channels_last", [True, False])
def test_memory_format(channels_last: bool) -> None:
    data = opened(channels_last=channels_last)
    wanted = torch.channels_last if channels_last else torch.contiguous_format
    for batch in (
        next(data.train(0, range(1), range(1), 1, 8)),
        next(data.evaluate("test", 0, 1, 4)),
    ):
        assert batch.x.is_contiguous(memory_format=wanted)
        assert batch.y.dtype == torch.int64
        assert batch.skipped == 0


def floats() -> Arrays:
    x = np.random.default_rng(0).random((20, 5), dtype=np.float32)
    x.flags.writeable = False
    return Arrays(x, np.arange(20), x, np.arange(20), 20)


def test_float_arrays_stay_as_they_are() -> None:
    arrays = floats()
    data = opened(FILES.model_copy(update={"normalize": "auto"}), arrays)
    assert data.info.sample_shape == (5,)
    batch = next(data.train(0, range(1), range(1), 1, 8))
    np.testing.assert_array_equal(batch.x.numpy(), arrays.train_x[batch.y.numpy()])


@pytest.mark.parametrize("augment", [Augment(crop_padding=1), Augment(flip=True)])
def test_augmenting_float_arrays_is_refused(augment: Augment) -> None:
    with pytest.raises(DataError, match=r"data\.augment: crop and flip need uint8 images"):
        opened(FILES.model_copy(update={"augment": augment}), floats())


@pytest.mark.parametrize(
    ("name", "augmented"),
    [("cifar10", True), ("cifar100", True), ("mnist", False), ("digits", False)],
)
def test_only_cifar_is_augmented_by_default(name: str, augmented: bool) -> None:
    arrays = numbered()
    section = ArraySetData(name=name, normalize="none")
    batch = next(opened(section, arrays).train(0, range(1), range(1), 1, 8))
    plain = torch.from_numpy(arrays.train_x[batch.y.numpy()]).permute(0, 3, 1, 2) / 255
    assert torch.allclose(batch.x, plain) != augmented


def test_the_jobs_augmentation_replaces_the_default() -> None:
    arrays = numbered()
    section = CIFAR.model_copy(update={"augment": Augment()})
    batch = next(opened(section, arrays).train(0, range(1), range(1), 1, 8))
    plain = torch.from_numpy(arrays.train_x[batch.y.numpy()]).permute(0, 3, 1, 2) / 255
    torch.testing.assert_close(batch.x, plain)


def test_without_a_selection_split_all_samples_are_trained_on() -> None:
    data = opened(CIFAR.model_copy(update={"selection_fraction": 0.0}))
    assert (data.info.train_size, data.info.selection_size) == (53, 0)
    with pytest.raises(DataError, match=r"data\.selection_fraction"):
        next(data.evaluate("selection", 0, 1, 4))


def test_wrong_steps_and_shares_are_refused() -> None:
    data = opened()
    with pytest.raises(ValueError, match="step 6 of an epoch of 6 steps"):
        list(data.train(0, range(5, 7), range(1), 1, 8))
    with pytest.raises(ValueError, match="share 0 of 3"):
        next(data.train(0, range(1), range(1), 3, 8))


def test_a_set_on_the_device_gives_the_same_samples_as_one_on_the_host() -> None:
    arrays = numbered(train=5000)
    indices = np.array([4999, 0, 4096, 7])
    makers: list[Callable[..., HostStore | DeviceStore]] = [HostStore, DeviceStore]
    copied: list[str] = []
    (x, y), (x2, y2) = (
        m(arrays.train_x, arrays.train_y, CPU).take(indices, lambda: copied.append("now"))
        for m in makers
    )
    assert copied == ["now", "now"]
    np.testing.assert_array_equal(x.numpy(), arrays.train_x[indices])
    assert torch.equal(x, x2)
    assert torch.equal(y, y2)


def test_the_front_door_shares_arrays_and_opens_them() -> None:
    section = ArraySetData(name="digits")
    shared = load_shared(section)
    assert shared is not None
    data = open_data(section, shared, seed=0, device=CPU, channels_last=True)
    info = data.info
    assert info.num_classes == 10
    assert info.sample_shape == (1, 8, 8)
    assert info.train_size + info.selection_size == len(shared.train_x)
    batch = next(data.train(0, range(1), range(1), 1, 64))
    assert batch.x.shape == (64, 1, 8, 8)
    data.close()
