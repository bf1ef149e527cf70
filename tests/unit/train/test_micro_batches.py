"""Shares of a global batch in proportion to the speeds of the workers."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from raytrain_opt.train.micro_batches import split_by_speed


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


@pytest.mark.parametrize("seed", range(50))
def test_no_other_split_is_done_earlier(seed: int) -> None:
    random = np.random.default_rng(seed)
    speeds = (10 ** random.uniform(-2, 2, size=random.integers(1, 5))).tolist()
    more = int(random.integers(0, 7))
    count = len(speeds) + more

    def duration(shares: tuple[int, ...] | list[int]) -> float:
        return max(share / speed for share, speed in zip(shares, speeds, strict=True))

    shares = split_by_speed(count, speeds)
    assert sum(shares) == count
    assert min(shares) >= 1
    every_split = product(range(1, more + 2), repeat=len(speeds))
    best = min(duration(split) for split in every_split if sum(split) == count)
    assert duration(shares) == pytest.approx(best)
