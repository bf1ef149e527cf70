"""Shares of a global batch in proportion to the speeds of the workers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from raytrain_opt.train.micro_batches import (
    choose_split,
    sharing_cost,
    split_by_speed,
    time_saved,
)
from tests.support.samples import Samples


@pytest.mark.parametrize(
    ("count", "speeds", "shares"),
    [
        (8, [1, 1, 1, 1], [2, 2, 2, 2]),
        (78, [1, 1, 1, 0.25], [24, 24, 24, 6]),
        (64, [1, 1, 1, 0.25], [20, 20, 20, 4]),
        (4, [1, 1, 1, 0.001], [1, 1, 1, 1]),
        (5, [0.001, 1], [1, 4]),
    ],
)
def test_shares_follow_the_speeds(count: int, speeds: list[float], shares: list[int]) -> None:
    assert split_by_speed(count, speeds) == shares


@pytest.mark.slow
def test_no_other_split_is_done_earlier(samples: Samples) -> None:
    for seed in samples(50):
        random = np.random.default_rng(seed)
        speeds = (10 ** random.uniform(-2, 2, size=random.integers(1, 5))).tolist()
        more = int(random.integers(0, 7))
        count = len(speeds) + more

        def duration(shares: Sequence[int], speeds: list[float] = speeds) -> float:
            return max(share / speed for share, speed in zip(shares, speeds, strict=True))

        shares = split_by_speed(count, speeds)
        assert sum(shares) == count
        assert min(shares) >= 1
        every_split = product(range(1, more + 2), repeat=len(speeds))
        best = min(duration(split) for split in every_split if sum(split) == count)
        assert duration(shares) == pytest.approx(best)


@pytest.mark.parametrize(
    ("count", "speeds", "cost"),
    [
        (4, [1, 1, 1, 1], 0.0),
        (4, [1, 1, 1, 0.25], 2.25),  # 4 s in place of 4 / 3.25 s
        (16, [1, 1, 1, 0.6], 0.125),  # 5 in place of 16 / 3.6
        (32, [1, 1, 1, 0.6], 0.0125),  # 9 in place of 32 / 3.6
    ],
)
def test_whole_micro_batches_cost_time(count: int, speeds: list[float], cost: float) -> None:
    assert sharing_cost(count, speeds) == pytest.approx(cost)


def test_the_time_saved_is_a_fraction_of_the_step() -> None:
    assert time_saved(4, 16, [1, 1, 1, 0.25]) == pytest.approx(1 - 5 / 16)
    assert time_saved(4, 64, [1, 1, 1, 1.06]) == 0.0  # the other three have 16 in any case


@pytest.mark.parametrize(
    ("samples", "speeds", "present", "split"),
    [
        (128, [], 1, 16),
        (128, [1, 1, 1, 0.25], 1, 16),
        (32, [], 1, 4),
        (32, [1, 1, 1, 0.6], 1, 8),  # 4 cost 12.5 %
        (32, [1, 1, 1, 1], 8, 8),  # no reason to change
        (48, [1, 1, 1, 0.25], 1, 4),  # 6 cost 8 %, 4 cost 1.6 %: 5 each, and 1
        (31, [1, 1, 1, 0.25], 1, 1),
        (3, [1, 1, 1, 0.25], 1, 1),
    ],
)
def test_micro_batches_are_as_fine_as_speeds_need_and_samples_allow(
    samples: int, speeds: list[float], present: int, split: int
) -> None:
    assert choose_split(samples, 4, speeds, present) == split


@pytest.mark.slow
def test_64_samples_per_worker_share_a_step_of_any_speeds_within_a_sixteenth(
    samples: Samples,
) -> None:
    """As long as the slowest worker is due one micro-batch."""
    for seed in samples(50):
        random = np.random.default_rng(seed)
        speeds = random.uniform(0.1, 1, size=random.integers(2, 9)).tolist()
        split = choose_split(64, len(speeds), speeds)
        assert sharing_cost(split * len(speeds), speeds) <= 1 / 16
