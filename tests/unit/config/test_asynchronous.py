"""The rules for jobs with parallel.mode: async."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain_opt.config.load import parse_job
from raytrain_opt.errors import JobError
from raytrain_opt.train.learner_config import LearnerConfig

GOOD = {"model": "resnet8", "data": "digits", "epochs": 1, "global_batch_size": 8}
ASYNC = {"mode": "async"}

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"batch_norm": {"sync": True}}, "batch_norm.sync", "needs equal shares of every step"),
    (
        {"batch_norm": {"recalibrate_batches": 2}},
        "batch_norm.recalibrate_batches",
        "are pooled after every epoch",
    ),
    ({"precision": "fp16"}, "precision", "use bf16"),
    ({"optimizer": {"name": "SGD", "clip_norm": 1}}, "optimizer.clip_norm", "use mode: sync"),
    ({"average": {"decay": "auto"}}, "average", "that all workers share; not async"),
    (
        {
            "optimizer": "ScheduleFreeSGD",
            "learning_rate": {"policy": "schedule", "shape": "constant"},
        },
        "optimizer.name",
        "needs parallel.mode: sync",
    ),
    (
        {"workers": {"count": {"min": 1, "max": 2}}},
        "workers.count",
        "continue without a worker that died",
    ),
    (
        {"parallel": {**ASYNC, "gradient_buckets": [1]}},
        "parallel.gradient_buckets",
        "belongs to parallel.mode",
    ),
    ({"parallel": {**ASYNC, "staleness_bound": -1}}, "parallel.staleness_bound", "at least 0"),
    (
        {"optimizer": "RMSpropWarmup", "learning_rate": {"policy": "schedule", "initial": 0.1}},
        "optimizer.name",
        "counts updates",
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
    ({"parallel": {"mode": "asynchronous"}}, "parallel.mode", "must be one of sync, async"),
    ({"parallel": {"staleness_bound": 2}}, "parallel.staleness_bound", "parallel.mode: async"),
]


@pytest.mark.parametrize(("changes", "path", "words"), REFUSED)
def test_settings_that_need_synchronous_workers_are_refused(
    changes: dict[str, Any], path: str, words: str
) -> None:
    with pytest.raises(JobError) as caught:
        parse_job({**GOOD, "parallel": ASYNC, **changes})
    [problem] = caught.value.problems
    assert problem.path == path
    assert words in problem.rule


@pytest.mark.parametrize(
    ("batch", "micro_batches", "splits"),
    [
        (192, None, [1, 2, 3, 4, 6]),  # the finest of 8 samples
        (2048, None, [1, 2, 4, 8, 16]),
        (48, None, [1]),
        (48, 24, [6]),
    ],
)
def test_a_step_can_be_cut_into_micro_batches_of_eight_samples(
    batch: int, micro_batches: int | None, splits: list[int]
) -> None:
    parallel = {**ASYNC, "micro_batches": micro_batches}
    changes = {"global_batch_size": batch, "workers": {"count": 4}, "parallel": parallel}
    assert LearnerConfig.from_job(parse_job({**GOOD, **changes})).async_splits == splits
