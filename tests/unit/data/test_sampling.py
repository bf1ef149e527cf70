"""Orders, splits and draws depend on the seed, the epoch and the step, and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from raytrain_opt.config.data import HoldOut
from raytrain_opt.data import sampling
from raytrain_opt.errors import DataError


@pytest.mark.parametrize(
    ("size", "fraction", "expected"),
    [(100, 0.1, 10), (60_000, 0.1, 5000), (100, 0.001, 1), (100, 0.0, 0)],
)
def test_size_of_the_validation_split(size: int, fraction: float, expected: int) -> None:
    train, validation = sampling.split_validation(size, HoldOut(fraction), seed=3)
    assert len(validation) == expected
    assert sorted([*train, *validation]) == list(range(size))
    assert (np.diff(train) > 0).all()
    assert (np.diff(validation) > 0).all()


def test_a_validation_split_that_leaves_no_training_sample_is_an_error() -> None:
    with pytest.raises(DataError, match=r"all 1 samples.*data\.validation_fraction: 0"):
        sampling.split_validation(1, HoldOut(0.5), seed=0)


def test_a_balanced_epoch_has_equally_many_of_each_class_and_repeats_evenly() -> None:
    labels = np.repeat([0, 1, 3], [70, 20, 10])
    split = sampling.TrainingSplit(100, HoldOut(0), 0, balanced_labels=labels)
    seen: set[int] = set()
    for epoch in range(8):
        order = split.order(epoch, search=False)
        assert len(order) == 100
        assert sorted(np.bincount(labels[order])) == [0, 33, 33, 34]
        times = np.bincount(order, minlength=100)
        for label in (0, 1, 3):
            of_class = times[labels == label]
            assert of_class.max() - of_class.min() <= 1
        seen |= set(order.tolist())
    assert len(seen) > 95  # samples that an epoch leaves out come in others
    again = sampling.TrainingSplit(100, HoldOut(0), 0, balanced_labels=labels)
    np.testing.assert_array_equal(again.order(7, search=False), order)
    assert not np.array_equal(split.order(6, search=False), order)


def test_a_balanced_search_leaves_out_the_validation_split() -> None:
    labels = np.repeat([0, 1], [90, 10])
    split = sampling.TrainingSplit(100, HoldOut(0.2), 0, balanced_labels=labels)
    assert not set(split.order(1, search=True)) & set(split.validation)
    assert split.sizes == (80, 20)


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
def test_micro_batches_cover_their_step_and_steps_cover_the_epoch(num_micro_batches: int) -> None:
    order = np.random.default_rng(0).permutation(47)
    parts = [
        sampling.micro_batch(order, step, number, num_micro_batches, 8)
        for step in range(6)
        for number in range(num_micro_batches)
    ]
    np.testing.assert_array_equal(np.concatenate([part.samples for part in parts]), order)
    full, last = parts[:-num_micro_batches], parts[-num_micro_batches:]
    assert {(len(part.samples), part.relative_size) for part in full} == {
        (8 // num_micro_batches, 1.0)
    }
    sizes = [len(part.samples) for part in last]
    assert max(sizes) - min(sizes) <= 1
    mean = 7 / num_micro_batches
    assert [part.relative_size for part in last] == pytest.approx([n / mean for n in sizes])


@pytest.mark.parametrize(("number", "num_micro_batches"), [(-1, 2), (2, 2), (0, 3)])
def test_wrong_micro_batches_are_errors(number: int, num_micro_batches: int) -> None:
    with pytest.raises(ValueError, match="micro-batch"):
        sampling.micro_batch(np.arange(8), 0, number, num_micro_batches, 8)


@pytest.mark.parametrize("step", [-1, 6])
def test_steps_outside_the_epoch_are_errors(step: int) -> None:
    with pytest.raises(ValueError, match=f"in step {step} of an epoch of"):
        sampling.micro_batch(np.arange(43), step, 0, 2, 8)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_ranks_cover_a_split_exactly_once(world_size: int) -> None:
    split = np.arange(5, 22)
    parts = [sampling.rank_indices(split, rank, world_size) for rank in range(world_size)]
    assert sorted(np.concatenate(parts)) == list(split)


def test_draws_do_not_depend_on_the_batch_size() -> None:
    large = sampling.draw_crop_flip(0, 1, 2, slice(0, 64), 4, True)
    small = sampling.draw_crop_flip(0, 1, 2, slice(5, 16), 4, True)
    for all_rows, rows in zip(large, small, strict=True):
        np.testing.assert_array_equal(all_rows[5:16], rows)


@pytest.mark.parametrize("other", [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_draws_differ_by_seed_epoch_and_step(other: tuple[int, int, int]) -> None:
    first, second = (
        sampling.draw_crop_flip(*key, slice(64), 4, True) for key in ((0, 0, 0), other)
    )
    assert not np.array_equal(first.top, second.top)
    assert not np.array_equal(first.flip, second.flip)
