"""From the job to its policy, and how many candidates to make room for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytrain_opt.config.schema import Job
from raytrain_opt.config.updates import OptimizerChoiceSection
from raytrain_opt.errors import JobError
from raytrain_opt.optim.epoch_steps import EpochSteps, length_of
from raytrain_opt.search import factory
from raytrain_opt.search.policy import History, Policy, TrainEpoch
from tests.support.synthetic_runs import write_schedule


def build_policy(job: Job, steps: EpochSteps) -> Policy:
    return factory.build_policy(job, length_of(job), steps)


def job(epochs: int = 4, **learning_rate: Any) -> Job:
    section = {"learning_rate": learning_rate} if learning_rate else {}
    return Job.model_validate(
        {
            "model": "small_cnn",
            "data": "digits",
            "epochs": epochs,
            "global_batch_size": 8,
            **section,
        }
    )


def test_replay_reads_the_file_of_an_earlier_run(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    write_schedule(path, (0.1, 0.2), (0.3, 0.3))
    policy = build_policy(job(epochs=2, policy="replay", schedule=str(path)), EpochSteps(2))
    action = policy.next(2, History())
    assert isinstance(action, TrainEpoch)
    assert action.steps.lrs == (0.3, 0.3)


def test_replay_refuses_other_rates_of_parameter_groups(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    write_schedule(path, (0.1, 0.2), (0.3, 0.3), lr_multipliers={"fc.*": 2.0})
    replay = job(epochs=2, policy="replay", schedule=str(path))
    with pytest.raises(JobError, match=r"lr_multipliers {'fc\.\*': 2\.0} in the run"):
        build_policy(replay, EpochSteps(2))
    multiplied = replay.optimizer.model_copy(update={"lr_multipliers": {"fc.*": 2.0}})
    assert build_policy(replay.model_copy(update={"optimizer": multiplied}), EpochSteps(2))


@pytest.mark.parametrize("recorded", [True, False])
def test_replay_refuses_a_weight_decay_of_the_other_kind(tmp_path: Path, recorded: bool) -> None:
    """The factors of one kind mean nothing to the other."""
    path = tmp_path / "schedule.jsonl"
    write_schedule(path, (0.1, 0.2), (0.3, 0.3), optimizer="Muon", auto_weight_decay=recorded)
    replay = job(epochs=2, policy="replay", schedule=str(path))
    for args in ({}, {"weight_decay": 0.01}, {"weight_decay": "auto"}):
        optimizer = OptimizerChoiceSection(name="Muon", args=args)
        changed = replay.model_copy(update={"optimizer": optimizer})
        if optimizer.has_auto_weight_decay == recorded:
            assert build_policy(changed, EpochSteps(2))
        else:
            with pytest.raises(JobError, match=r"optimizer: was .* weight_decay: .* in the run"):
                build_policy(changed, EpochSteps(2))


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("{\n", r"not a schedule\.jsonl"), ("", r"not a schedule\.jsonl")],
)
def test_replay_says_what_is_wrong_with_the_file(
    tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "schedule.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(JobError, match=message) as error:
        build_policy(job(policy="replay", schedule=str(path)), EpochSteps(2))
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("epochs", "section", "expected"),
    [
        (40, {"policy": "stpt"}, 8),
        (4, {"policy": "stpt", "candidates": [2.0, 1.0, 0.5]}, 3),
        (4, {"policy": "stpt", "candidates": [1.0, 0.5], "alpha": 1.0}, 2),
        (4, {"policy": "stpt", "candidates": [1.0], "alpha": 10**6}, 0),
        (4, {"policy": "stpt_horizon"}, 3),
        (4, {"policy": "schedule"}, 0),
        (4, {"policy": "replay", "schedule": "not read here"}, 0),
    ],
)
def test_max_candidates(epochs: int, section: dict[str, Any], expected: int) -> None:
    assert job(epochs, **section).learning_rate.max_candidates == expected


def test_a_horizon_aware_search_needs_the_split_that_it_scores_on() -> None:
    with pytest.raises(JobError, match="stpt_horizon decides by the validation split"):
        Job.model_validate(
            {
                "model": "small_cnn",
                "data": {"name": "digits", "validation_fraction": 0},
                "epochs": 4,
                "global_batch_size": 8,
                "learning_rate": {"policy": "stpt_horizon"},
            }
        )
