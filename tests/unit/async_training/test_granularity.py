"""How finely asynchronous workers cut a step, from the speed of each phase."""

from __future__ import annotations

import pytest

from raytrain_opt.async_training.granularity import Granularity


@pytest.mark.parametrize(
    ("speeds", "chosen"),
    [
        ([100, 99, 98, 97, 50, 50], [1, 2, 4, 8, 8, 8]),  # nothing is finer
        ([100, 120, 107, 90, 90], [1, 2, 4, 2, 2]),  # more than a tenth below the fastest
        ([100, 95, 91, 89, 200], [1, 2, 4, 8, 4]),  # small losses add up
        ([100, 50, 200, 200], [1, 2, 1, 1]),
    ],
)
def test_micro_batches_become_finer_until_that_costs_speed(
    speeds: list[float], chosen: list[int]
) -> None:
    granularity, splits = Granularity([1, 2, 4, 8]), []
    for samples_per_s in speeds:
        splits.append(granularity.split)
        granularity.measured(samples_per_s)
    assert splits == chosen


def test_a_given_number_stays() -> None:
    granularity = Granularity([6])
    granularity.measured(100)
    granularity.measured(10)
    assert granularity.split == 6
