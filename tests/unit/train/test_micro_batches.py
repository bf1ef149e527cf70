"""Shares of a global batch in proportion to the speeds of the workers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from raytrain_opt.train.micro_batches import divide_by_speed, step_time
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
    ranges = divide_by_speed(count, speeds)
    assert [len(share) for share in ranges] == shares
    assert [number for share in ranges for number in share] == [*range(count)]


@pytest.mark.slow
def test_no_other_split_is_done_earlier(samples: Samples) -> None:
    for seed in samples(50):
        random = np.random.default_rng(seed)
        speeds = (10 ** random.uniform(-2, 2, size=random.integers(1, 5))).tolist()
        more = int(random.integers(0, 7))
        count = len(speeds) + more

        def duration(shares: Sequence[int], speeds: list[float] = speeds) -> float:
            return max(share / speed for share, speed in zip(shares, speeds, strict=True))

        shares = [len(share) for share in divide_by_speed(count, speeds)]
        assert sum(shares) == count
        assert min(shares) >= 1
        every_split = product(range(1, more + 2), repeat=len(speeds))
        best = min(duration(split) for split in every_split if sum(split) == count)
        assert duration(shares) == pytest.approx(best)


@pytest.mark.parametrize(
    ("count", "speeds", "time"),
    [
        (4, [1, 1, 1, 1], 1.0),
        (4, [1, 1, 1, 0.25], 3.25),  # 4 s in place of 4 / 3.25 s
        (16, [1, 1, 1, 0.6], 1.125),  # 5 in place of 16 / 3.6
        (32, [1, 1, 1, 0.6], 1.0125),  # 9 in place of 32 / 3.6
    ],
)
def test_a_step_takes_as_long_as_its_slowest_worker(
    count: int, speeds: list[float], time: float
) -> None:
    assert step_time(divide_by_speed(count, speeds), speeds) == pytest.approx(time)
