"""Policies without candidates: a fixed schedule, and the replay of a recorded one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from raytrain_opt.config.learning_rate import SchedulePolicy
from raytrain_opt.errors import JobError
from raytrain_opt.optim.epoch_steps import EpochSpan, EpochSteps, Length
from raytrain_opt.results import Steps
from raytrain_opt.search.factory import read_schedule
from raytrain_opt.search.fixed_schedule import FixedSchedule, RecordedEpoch, RecordedSchedule
from raytrain_opt.search.policy import History, StartAgain, TrainEpoch
from tests.support.synthetic_runs import write_schedule

EMPTY = History()

LRS = (0.1, 0.1, 0.2, 0.2, 0.2, 0.1)
RECORDED = (
    '{"epoch": 1, "optimizer": "SGD", "auto_weight_decay": false, "restarts": false, '
    '"lr_multipliers": {}, "steps": {"first": 0, "lrs": [0.5]}}\n'
)


def scheduled(length: Length, steps: EpochSteps, **section: Any) -> FixedSchedule:
    values = {"policy": "schedule", "shape": "linear", "initial": 1.0, **section}
    return FixedSchedule(SchedulePolicy.model_validate(values), length, steps)


def test_plateaus_are_those_of_torchs_scheduler() -> None:
    losses = tuple(np.random.default_rng(0).normal(size=60))
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=3, threshold=0.0, eps=0.0)
    fields: dict[str, Any] = {"shape": "plateau", "gamma": 0.5, "patience": 3}
    policy = scheduled(Length(60), EpochSteps(1), **fields)
    warmed = scheduled(Length(70), EpochSteps(1), **fields, warmup={"epochs": 10})
    for epoch, loss in enumerate(losses, start=1):
        scheduler.step(loss)
        [lr] = policy.next(epoch + 1, History(epoch_losses=losses[:epoch])).steps.lrs
        assert lr == pytest.approx(optimizer.param_groups[0]["lr"])
        after = History(epoch_losses=((0.0,) * 10 + losses)[: epoch + 10])
        assert warmed.next(epoch + 11, after).steps.lrs == (lr,)


def recorded(*epochs: Steps, restarts: Sequence[int] = ()) -> RecordedSchedule:
    """Return the schedule of these epochs; those in `restarts` begin from the initial weights."""
    values = {"optimizer": "SGD", "auto_weight_decay": False, "lr_multipliers": {}}
    return RecordedSchedule(
        tuple(
            RecordedEpoch.model_validate(
                values | {"epoch": epoch, "steps": steps, "restarts": epoch in restarts}
            )
            for epoch, steps in enumerate(epochs, 1)
        )
    )


def test_a_recorded_schedule_is_read_exactly(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    write_schedule(path, (1 / 3, *LRS[1:3]), LRS[3:])
    expected = recorded(Steps(0, (1 / 3, *LRS[1:3])), Steps(0, LRS[3:]))
    assert read_schedule(str(path)) == expected


def test_replay_trains_the_recorded_steps() -> None:
    policy = recorded(Steps(0, LRS[:3], 0.5, held_out=4), Steps(0, LRS[3:], 2.0), restarts=[2])
    policy.check(epochs=2, steps=EpochSteps(3))
    again = policy.next(2, EMPTY)
    assert again == StartAgain(2, "replay")
    assert policy.last_restart == 2
    for epoch, history in ((1, EMPTY), (2, EMPTY.after_restart(again))):
        action = policy.next(epoch, history)
        assert isinstance(action, TrainEpoch)
        assert action.steps == policy.epochs[epoch - 1].steps


def test_replay_trains_the_only_optimizer_of_the_job() -> None:
    steps = Steps(0, LRS[:3], optimizer=1)
    assert recorded(steps).next(1, EMPTY).steps == replace(steps, optimizer=0)


@pytest.mark.parametrize(("epochs", "steps"), [(3, 3), (1, 3), (2, 4), (3, 2), (1, 6)])
def test_replay_refuses_a_training_of_another_length(epochs: int, steps: int) -> None:
    with pytest.raises(JobError, match=r"2 epochs of 3 to 3 steps.*has \d of \d") as error:
        recorded(Steps(0, LRS[:3]), Steps(0, LRS[3:])).check(epochs, EpochSteps(steps))
    assert error.value.problems[0].path == "learning_rate.schedule"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{\n",
        "[]\n",
        RECORDED.replace("[0.5]", "1"),
        RECORDED.replace("0.5", '"fast"'),
        RECORDED.replace("0.5", f"{10**400}"),
        "[" * 100_000 + "\n",
    ],
)
def test_a_file_that_is_no_schedule_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(JobError, match=r"is not a schedule\.jsonl of a run.*run\.jsonl"):
        read_schedule(str(path))


def test_an_epoch_with_fewer_updates_covers_the_same_part_of_the_schedule() -> None:
    policy = scheduled(Length(2), EpochSteps(4, ((2, 2),)), initial=0.8)
    assert policy.next(1, EMPTY).steps.lrs == pytest.approx((0.8, 0.7, 0.6, 0.5))
    assert policy.next(2, EMPTY).steps.lrs == pytest.approx((0.4, 0.2))


def test_epochs_of_different_length_are_replayed() -> None:
    steps = EpochSteps(4, ((2, 2),))
    recorded(Steps(0, LRS[:4]), Steps(0, LRS[4:])).check(2, steps)
    shorter = recorded(Steps(0, LRS[:4]), Steps(2, LRS[4:]))  # the end of a limited time
    shorter.check(2, EpochSteps(4))
    with pytest.raises(JobError, match="2 epochs of 4 to 4 steps"):
        shorter.check(2, steps)


def test_a_planned_schedule_passes_faster_when_less_time_is_left() -> None:
    """The first epoch takes a quarter of the schedule; the rest then has to fit into one."""
    policy = scheduled(Length(seconds=60.0), EpochSteps(2), initial=0.8)
    first = EpochSpan(1, 4, 0.0, 0.25, 1.0, 2, 8)
    second = EpochSpan(2, 2, 0.25, 1.0, 1.0, 2, 4)
    history = EMPTY.after_span(first)
    assert policy.next(1, history).steps.lrs == pytest.approx((0.8, 0.7))
    assert policy.next(2, history.after_span(second)).steps.lrs == pytest.approx((0.6, 0.3))


def test_a_warm_up_has_to_fit_into_the_training_as_first_planned() -> None:
    history = EMPTY.after_span(EpochSpan(1, 4, 0.0, 0.25, 1.0, 2, 7))
    fits, too_long = (
        scheduled(Length(seconds=60.0), EpochSteps(steps), warmup={"epochs": 4})
        for steps in (1, 2)
    )
    assert len(fits.next(1, history).steps.lrs) == 2
    with pytest.raises(JobError, match=r"warmup\.epochs: is longer than .* 7 updates"):
        too_long.next(1, history)
    with pytest.raises(JobError, match=r"warmup\.steps: is longer than .* 10 updates"):
        scheduled(Length(1), EpochSteps(10), warmup={"steps": 15})
