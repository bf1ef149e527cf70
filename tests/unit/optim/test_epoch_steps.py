"""A global batch that grows: its factor, and the number of updates in each epoch."""

from __future__ import annotations

import pytest

from raytrain_opt.config.updates import RampStep
from raytrain_opt.errors import JobError
from raytrain_opt.optim.epoch_steps import EpochSteps, epoch_steps, ramp_factor

RAMP = [RampStep(epoch=3, factor=2), RampStep(epoch=5, factor=6)]


def test_factors_apply_from_their_epoch_on() -> None:
    assert [ramp_factor(RAMP, epoch) for epoch in range(1, 7)] == [1, 1, 2, 2, 6, 6]
    assert ramp_factor([], 9) == 1


def test_each_epoch_has_only_full_global_batches() -> None:
    steps = epoch_steps(103, 8, RAMP)
    assert [steps(epoch) for epoch in range(1, 7)] == [12, 12, 6, 6, 2, 2]


def test_the_last_update_of_an_epoch_may_be_smaller() -> None:
    steps = epoch_steps(103, 8, RAMP, drop_last=False)
    assert [steps(epoch) for epoch in range(1, 7)] == [13, 13, 7, 7, 3, 3]
    assert epoch_steps(104, 8, drop_last=False)(1) == 13


def test_a_batch_larger_than_the_data_names_its_field() -> None:
    with pytest.raises(JobError, match=r"batch_ramp\.1\.factor.*40 samples"):
        epoch_steps(40, 8, RAMP)
    with pytest.raises(JobError, match="global_batch_size.*7 samples"):
        epoch_steps(7, 8)


@pytest.mark.parametrize("steps", [epoch_steps(103, 8, RAMP), EpochSteps(5), EpochSteps(5, ())])
def test_updates_before_an_epoch_are_the_sum_of_all_earlier_epochs(steps: EpochSteps) -> None:
    for epoch in range(1, 9):
        assert steps.before(epoch) == sum(steps(earlier) for earlier in range(1, epoch))
