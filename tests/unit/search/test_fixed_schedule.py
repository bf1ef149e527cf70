"""Policies without candidates: a fixed schedule, and the replay of a recorded one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raytrain_opt.errors import JobError
from raytrain_opt.optim.epoch_steps import EpochSteps
from raytrain_opt.optim.schedules import Linear
from raytrain_opt.search.fixed_schedule import FixedSchedule, RecordedSchedule
from raytrain_opt.search.policy import History, TryCandidates

EMPTY = History()

LRS = (0.1, 0.1, 0.2, 0.2, 0.2, 0.1)


def test_each_epoch_trains_at_its_part_of_the_schedule() -> None:
    policy = FixedSchedule(Linear(0.6, 0.0, steps=6), EpochSteps(3))
    first, second = policy.next(1, EMPTY), policy.next(2, EMPTY)
    assert first.lrs == pytest.approx((0.6, 0.5, 0.4))
    assert second.lrs == pytest.approx((0.3, 0.2, 0.1))
    assert (first.epoch, second.epoch) == (1, 2)


def test_it_has_no_candidates_to_decide() -> None:
    policy = FixedSchedule(Linear(0.6, 0.0, steps=6), EpochSteps(3))
    with pytest.raises(ValueError, match="no candidates"):
        policy.decide(TryCandidates(1, 0.6, "", (), ()), [], EMPTY)


def test_a_recorded_schedule_is_short_json_and_is_read_exactly() -> None:
    recorded = RecordedSchedule((3, 3), (1 / 3, *LRS[1:]), (0.1, 1 / 3))
    value = json.loads(json.dumps(recorded.to_json()))
    assert [segment["steps"] for segment in value["segments"]] == [1, 1, 3, 1]
    assert (value["schema_version"], value["steps"], value["epoch_steps"]) == (1, 6, [3, 3])
    assert RecordedSchedule.from_json(value, "it") == recorded


def test_an_empty_schedule_is_valid() -> None:
    assert RecordedSchedule.from_json(RecordedSchedule((), ()).to_json(), "it").lrs == ()


def test_replay_trains_at_the_recorded_rates() -> None:
    policy = RecordedSchedule((3, 3), LRS, (0.5, 2.0)).policy(epochs=2, steps=EpochSteps(3))
    epochs = [policy.next(epoch, EMPTY) for epoch in (1, 2)]
    assert epochs[0].lrs + epochs[1].lrs == LRS
    assert [epoch.weight_decay_factor for epoch in epochs] == [0.5, 2.0]


@pytest.mark.parametrize(("epochs", "steps"), [(3, 3), (1, 3), (2, 4), (3, 2), (1, 6)])
def test_replay_refuses_a_training_of_another_length(epochs: int, steps: int) -> None:
    with pytest.raises(JobError, match=r"2 epochs of 3 steps.*has \d of \d") as error:
        RecordedSchedule((3, 3), LRS).policy(epochs, EpochSteps(steps))
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
def test_a_file_that_is_no_schedule_is_refused_by_name(value: Any) -> None:
    with pytest.raises(JobError, match=r"run\.json is not a schedule\.json of a run"):
        RecordedSchedule.from_json(value, "run.json")


@pytest.mark.parametrize("steps", [0, -1, 10**10])
def test_segments_of_impossible_length_are_refused(steps: int) -> None:
    value = {"epoch_steps": [3], "segments": [{"steps": steps, "lr": 0.1}]}
    with pytest.raises(JobError, match="each segment needs at least 1"):
        RecordedSchedule.from_json(value, "run.json")


def test_every_epoch_needs_its_weight_decay_factor() -> None:
    value = {"epoch_steps": [3, 3], "segments": [], "weight_decay_factors": [1.0]}
    with pytest.raises(JobError, match="1 weight_decay_factors for 2 epochs"):
        RecordedSchedule.from_json(value, "run.json")


def test_segments_and_epochs_must_agree() -> None:
    value = {"epoch_steps": [3, 3], "segments": [{"steps": 5, "lr": 0.1}]}
    with pytest.raises(JobError, match="its segments have 5 steps, its epochs 6"):
        RecordedSchedule.from_json(value, "run.json")


def test_an_epoch_with_fewer_updates_covers_the_same_part_of_the_schedule() -> None:
    policy = FixedSchedule(Linear(0.8, 0.0, steps=8), EpochSteps(4, ((2, 2),)))
    assert policy.next(1, EMPTY).lrs == pytest.approx((0.8, 0.7, 0.6, 0.5))
    assert policy.next(2, EMPTY).lrs == pytest.approx((0.4, 0.2))


def test_a_replay_gives_epochs_of_different_length_their_own_rates() -> None:
    policy = RecordedSchedule((4, 2), LRS).policy(epochs=2, steps=EpochSteps(4, ((2, 2),)))
    assert (policy.next(1, EMPTY).lrs, policy.next(2, EMPTY).lrs) == (LRS[:4], LRS[4:])
