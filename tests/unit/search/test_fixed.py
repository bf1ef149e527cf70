"""Policies without candidates: a schedule read off, and a found one replayed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raytrain_opt.errors import JobError
from raytrain_opt.optim.batch_ramp import EpochSteps
from raytrain_opt.optim.schedules import Linear
from raytrain_opt.search.fixed import FixedSchedule, FoundSchedule

LRS = (0.1, 0.1, 0.2, 0.2, 0.2, 0.1)


def test_each_epoch_trains_at_its_part_of_the_schedule() -> None:
    policy = FixedSchedule(Linear(0.6, 0.0, steps=6), EpochSteps(3))
    first, second = policy.plan(1, ()), policy.plan(2, ())
    assert first.lrs == pytest.approx((0.6, 0.5, 0.4))
    assert second.lrs == pytest.approx((0.3, 0.2, 0.1))
    assert (first.candidates, second.epoch, second.base_lr) == ((), 2, second.lrs[0])


def test_there_is_nothing_to_choose() -> None:
    policy = FixedSchedule(Linear(0.6, 0.0, steps=6), EpochSteps(3))
    with pytest.raises(ValueError, match="no candidates"):
        policy.choose(policy.plan(1, ()), [])


def test_a_found_schedule_is_short_json_and_comes_back_exactly() -> None:
    found = FoundSchedule((3, 3), (1 / 3, *LRS[1:]))
    value = json.loads(json.dumps(found.to_json()))
    assert [segment["steps"] for segment in value["segments"]] == [1, 1, 3, 1]
    assert (value["schema_version"], value["steps"], value["epoch_steps"]) == (1, 6, [3, 3])
    assert FoundSchedule.from_json(value, "it") == found


def test_an_empty_schedule_is_one() -> None:
    assert FoundSchedule.from_json(FoundSchedule((), ()).to_json(), "it").lrs == ()


def test_replay_trains_at_the_found_rates() -> None:
    policy = FoundSchedule((3, 3), LRS).policy(epochs=2, steps=EpochSteps(3))
    assert policy.plan(1, ()).lrs + policy.plan(2, ()).lrs == LRS


@pytest.mark.parametrize(("epochs", "steps"), [(3, 3), (1, 3), (2, 4), (3, 2), (1, 6)])
def test_replay_refuses_a_training_of_another_length(epochs: int, steps: int) -> None:
    with pytest.raises(JobError, match=r"2 epochs of 3 steps.*has \d of \d") as error:
        FoundSchedule((3, 3), LRS).policy(epochs, EpochSteps(steps))
    assert error.value.problems[0].path == "learning_rate.schedule"


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"segments": []},
        {"epoch_steps": [3]},
        {"epoch_steps": [3], "segments": [{"steps": 3}]},
        {"epoch_steps": [3], "segments": [{"steps": "many", "lr": 0.1}]},
        {"epoch_steps": None, "segments": []},
        {"epoch_steps": [3], "segments": [["steps", 3]]},
    ],
)
def test_what_is_no_schedule_is_refused_by_name(value: Any) -> None:
    with pytest.raises(JobError, match=r"found\.json is not a schedule\.json of a run"):
        FoundSchedule.from_json(value, "found.json")


@pytest.mark.parametrize("steps", [0, -1, 10**10])
def test_segments_of_impossible_length_are_refused(steps: int) -> None:
    value = {"epoch_steps": [3], "segments": [{"steps": steps, "lr": 0.1}]}
    with pytest.raises(JobError, match="each segment has at least one"):
        FoundSchedule.from_json(value, "found.json")


def test_segments_and_epochs_must_agree() -> None:
    value = {"epoch_steps": [3, 3], "segments": [{"steps": 5, "lr": 0.1}]}
    with pytest.raises(JobError, match="its segments have 5 steps, its epochs 6"):
        FoundSchedule.from_json(value, "found.json")


def test_an_epoch_with_fewer_updates_goes_through_as_much_of_the_schedule() -> None:
    policy = FixedSchedule(Linear(0.8, 0.0, steps=8), EpochSteps(4, ((2, 2),)))
    assert policy.plan(1, ()).lrs == pytest.approx((0.8, 0.7, 0.6, 0.5))
    assert policy.plan(2, ()).lrs == pytest.approx((0.4, 0.2))


def test_a_replay_keeps_epochs_of_different_length_apart() -> None:
    policy = FoundSchedule((4, 2), LRS).policy(epochs=2, steps=EpochSteps(4, ((2, 2),)))
    assert (policy.plan(1, ()).lrs, policy.plan(2, ()).lrs) == (LRS[:4], LRS[4:])
