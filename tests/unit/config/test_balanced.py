"""The rules for jobs whose workers share each step by their speeds, and how finely they do."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain_opt.config.load import parse_job
from raytrain_opt.errors import JobError
from raytrain_opt.train.learner_config import LearnerConfig

GOOD = {
    "model": "resnet8",
    "data": "digits",
    "epochs": 1,
    "global_batch_size": 48,
    "workers": {"count": 2},
}


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"parallel": {"mode": "balanced", "micro_batches": 3}}, "micro_batches", "multiple of"),
        ({"parallel": {"mode": "balanced", "micro_batches": 10}}, "micro_batches", "divides"),
        (
            {"parallel": {"mode": "balanced", "speeds": [1]}, "workers": {"count": "auto"}},
            "speeds",
            "set workers.count",
        ),
        ({"parallel": {"micro_batches": 4}}, "micro_batches", "mode: balanced or auto"),
        ({"parallel": {"mode": "balanced", "speeds": [1]}}, "speeds", "each of the 2 workers"),
        ({"parallel": {"mode": "balanced", "speeds": [1, 0]}}, "speeds.1", "more than 0"),
        ({"parallel": {"mode": "auto", "speeds": [1, 2]}}, "speeds", "mode: balanced"),
        (
            {
                "parallel": {"mode": "balanced", "speeds": [1, 2]},
                "workers": {"count": {"min": 1, "max": 2}},
            },
            "speeds",
            "no smaller workers.count.min",
        ),
        (
            {"parallel": {"mode": "balanced", "staleness_bound": 2}},
            "staleness_bound",
            "mode: async",
        ),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(JobError) as caught:
        parse_job({**GOOD, **changes})
    [problem] = caught.value.problems
    assert problem.path == f"parallel.{path}"
    assert words in problem.rule


def test_batch_norm_of_all_workers_needs_equal_shares() -> None:
    with pytest.raises(JobError, match=r"batch_norm\.sync.*equal shares"):
        parse_job({**GOOD, "batch_norm": {"sync": True}, "parallel": {"mode": "balanced"}})


@pytest.mark.parametrize(
    ("parallel", "batch", "micro_batches"),
    [
        ({"mode": "sync"}, 48, 2),
        ({"mode": "auto"}, 48, 2),
        ({"mode": "balanced"}, 48, 6),  # of 8 samples
        ({"mode": "balanced"}, 2 * 512, 32),  # 16 per worker
        ({"mode": "balanced"}, 14, 2),  # too few samples to share
        ({"mode": "balanced", "micro_batches": 12}, 48, 12),
    ],
)
def test_a_global_batch_is_cut_as_finely_as_its_workers_need(
    parallel: dict[str, Any], batch: int, micro_batches: int
) -> None:
    job = parse_job({**GOOD, "global_batch_size": batch, "parallel": parallel})
    assert LearnerConfig.from_job(job).micro_batches == micro_batches
