"""How finely asynchronous workers cut a step, from the speed of each phase."""

from __future__ import annotations

import pytest

from raytrain_opt.async_training.granularity import Granularity


@pytest.mark.parametrize(
    ("share", "speeds", "chosen"),
    [
        (0.0, [100, 95, 50, 50], [1, 8, 8, 8]),
        (0.1, [100, 120, 120], [1, 8, 8]),
        (0.2, [100, 100, 100], [1, 4, 4]),  # 8 messages would take longer than computing
        (1.5, [100, 50, 100], [1, 1, 1]),
        (0.1, [100, 70, 89, 95, 50], [1, 8, 4, 2, 2]),  # more than a tenth slower
        (0.1, [100, 50, 50, 50, 50], [1, 8, 4, 2, 1]),
        (0.1, [0, 100, 120], [1, 1, 8]),  # the first phase had no step left
    ],
)
def test_micro_batches_are_as_fine_as_the_speed_allows(
    share: float, speeds: list[float], chosen: list[int]
) -> None:
    granularity, splits = Granularity([1, 2, 4, 8]), []
    for samples_per_s in speeds:
        splits.append(granularity.split)
        granularity.measured(samples_per_s, share)
    assert splits == chosen


def test_a_given_number_stays() -> None:
    granularity = Granularity([6])
    for samples_per_s in (100, 10, 1):
        granularity.measured(samples_per_s, 2.0)
        assert granularity.split == 6
