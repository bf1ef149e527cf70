"""The rules for jobs with parallel.mode: async."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain_opt.config.schema import Job
from raytrain_opt.errors import JobError
from raytrain_opt.train.learner_config import LearnerConfig

GOOD = {"model": "resnet8", "data": "digits", "epochs": 1, "global_batch_size": 8}
ASYNC = {"mode": "async"}

SCHEDULE = {"policy": "schedule", "initial": 0.1}
TOGETHER = "needs workers that take each step together"

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"batch_norm": {"recalibrate_batches": 2}}, "batch_norm.recalibrate_batches", TOGETHER),
    ({"precision": "fp16"}, "precision", TOGETHER),
    ({"optimizer": {"name": "SGD", "clip_norm": 1}}, "optimizer.clip_norm", TOGETHER),
    ({"average": "auto"}, "average", TOGETHER),
    ({"optimizer": "RMSpropWarmup", "learning_rate": SCHEDULE}, "optimizer.name", TOGETHER),
    ({"workers": {"count": {"min": 1, "max": 2}}}, "workers.count", TOGETHER),
    (
        {"parallel": {**ASYNC, "gradient_buckets": [1]}},
        "parallel.gradient_buckets",
        "belongs to parallel.mode",
    ),
    (
        {"parallel": {**ASYNC, "micro_batches": 3}, "workers": {"count": 2}},
        "parallel.micro_batches",
        "multiple of workers.count",
    ),
    (
        {"parallel": {**ASYNC, "micro_batches": 2}, "workers": {"count": "auto"}},
        "parallel.micro_batches",
        "set workers.count",
    ),
    ({"parallel": {"staleness_bound": 2}}, "parallel.staleness_bound", "parallel.mode: async"),
]


@pytest.mark.parametrize(("changes", "path", "words"), REFUSED)
def test_settings_that_need_synchronous_workers_are_refused(
    changes: dict[str, Any], path: str, words: str
) -> None:
    with pytest.raises(JobError) as caught:
        Job.model_validate({**GOOD, "parallel": ASYNC, **changes})
    [problem] = caught.value.problems
    assert problem.path == path
    assert words in problem.rule


@pytest.mark.parametrize(
    ("batch", "micro_batches", "updates"),
    [(192, None, 4), (2048, None, 4), (96, None, 3), (52, None, 1), (8, None, 1), (48, 24, 6)],
)
def test_a_step_is_cut_into_micro_batches_of_at_least_eight_samples(
    batch: int, micro_batches: int | None, updates: int
) -> None:
    parallel = {**ASYNC, "micro_batches": micro_batches}
    changes = {"global_batch_size": batch, "workers": {"count": 4}, "parallel": parallel}
    assert LearnerConfig.from_job(Job.model_validate({**GOOD, **changes})).async_updates == updates
