"""Orders, splits and draws: functions of the seed, the epoch and the step alone."""

from __future__ import annotations

import numpy as np
import pytest

from raytrain_opt.data import order
from raytrain_opt.data.order import Purpose
from raytrain_opt.errors import DataError


@pytest.mark.parametrize(
    ("size", "fraction", "max_samples", "expected"),
    [(100, 0.1, 5000, 10), (100, 0.1, 7, 7), (100, 0.001, 5000, 1), (100, 0.0, 5000, 0)],
)
def test_selection_size(size: int, fraction: float, max_samples: int, expected: int) -> None:
    train, selection = order.split_selection(size, fraction, max_samples, seed=3)
    assert len(selection) == expected
    assert sorted([*train, *selection]) == list(range(size))
    assert (np.diff(train) > 0).all()
    assert (np.diff(selection) > 0).all()


def test_selection_depends_on_the_seed_only() -> None:
    first = order.split_selection(1000, 0.1, 5000, seed=1)[1]
    again = order.split_selection(1000, 0.1, 5000, seed=1)[1]
    other = order.split_selection(1000, 0.1, 5000, seed=2)[1]
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_selection_that_leaves_nothing_to_train_on_is_refused() -> None:
    with pytest.raises(DataError, match=r"has 1 samples.*data\.selection_fraction: 0"):
        order.split_selection(1, 0.5, 10, seed=0)


def test_epoch_orders_are_permutations_and_differ() -> None:
    train = np.arange(10, 200)
    orders = [order.epoch_order(train, 0, epoch) for epoch in range(3)]
    for indices in orders:
        np.testing.assert_array_equal(np.sort(indices), train)
    assert not np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[1], orders[2])
    assert not np.array_equal(orders[0], order.epoch_order(train, 1, 0))


def test_remembered_orders_are_the_computed_ones() -> None:
    train = np.arange(50)
    orders = order.EpochOrders(train, seed=4)
    for epoch in (0, 1, 0, 0, 2):
        np.testing.assert_array_equal(orders.of(epoch), order.epoch_order(train, 4, epoch))


@pytest.mark.parametrize("num_shares", [1, 2, 4])
def test_shares_tile_the_steps_and_steps_tile_the_epoch(num_shares: int) -> None:
    indices = order.epoch_order(np.arange(43), 0, 0)
    seen = [
        order.step_indices(indices, step, 8)[order.share_places(share, num_shares, 8)]
        for step in range(5)
        for share in range(num_shares)
    ]
    np.testing.assert_array_equal(np.concatenate(seen), indices[:40])


@pytest.mark.parametrize(("share", "num_shares"), [(-1, 2), (2, 2), (0, 3)])
def test_wrong_shares_are_refused(share: int, num_shares: int) -> None:
    with pytest.raises(ValueError, match="share"):
        order.share_places(share, num_shares, 8)


@pytest.mark.parametrize("step", [-1, 5])
def test_steps_outside_the_epoch_are_refused(step: int) -> None:
    with pytest.raises(ValueError, match=f"step {step} of an epoch of 5 steps"):
        order.step_indices(np.arange(43), step, 8)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_ranks_cover_a_split_exactly_once(world_size: int) -> None:
    split = np.arange(5, 22)
    parts = [order.rank_indices(split, rank, world_size) for rank in range(world_size)]
    assert sorted(np.concatenate(parts)) == list(split)


def test_draws_do_not_depend_on_the_batch_size() -> None:
    large = order.draw_crop_flip(0, 1, 2, 64, 4, True)
    small = order.draw_crop_flip(0, 1, 2, 16, 4, True)
    part = large.take(slice(0, 16))
    for name in ("top", "left", "flip"):
        np.testing.assert_array_equal(getattr(part, name), getattr(small, name))


@pytest.mark.parametrize("other", [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_draws_differ_by_seed_epoch_and_step(other: tuple[int, int, int]) -> None:
    first, second = (order.draw_crop_flip(*key, 64, 4, True) for key in ((0, 0, 0), other))
    assert not np.array_equal(first.top, second.top)
    assert not np.array_equal(first.flip, second.flip)


def test_draws_are_uniform_over_the_whole_range() -> None:
    draws = order.draw_crop_flip(0, 0, 0, 90_000, 4, True)
    for corner in (draws.top, draws.left):
        counts = np.bincount(corner, minlength=9)
        assert len(counts) == 9
        assert (abs(counts - 10_000) < 500).all()  # 5 standard deviations
    assert abs(draws.flip.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(draws.top, draws.left)[0, 1]) < 0.02
    assert not order.draw_crop_flip(0, 0, 0, 100, 0, False).flip.any()


def test_sample_seeds_fit_32_bits_and_differ() -> None:
    keys = [
        (seed, purpose, epoch, index)
        for seed in (0, 1)
        for purpose in (Purpose.TRAIN_SAMPLE, Purpose.TEST_SAMPLE)
        for epoch in range(3)
        for index in range(50)
    ]
    seeds = [order.sample_seed(*key) for key in keys]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert seeds == [order.sample_seed(*key) for key in keys]


def test_seeds_beyond_64_bits_are_accepted() -> None:
    assert order.generator(2**64 + 5, Purpose.ORDER).integers(1000) == order.generator(
        5, Purpose.ORDER
    ).integers(1000)
