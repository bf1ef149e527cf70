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
    ("parallel", "batch", "split"),
    [
        ({"mode": "sync"}, 48, 1),
        ({"mode": "auto"}, 48, 1),
        ({"mode": "balanced"}, 48, 3),  # of 8 samples
        ({"mode": "balanced"}, 2 * 512, 16),
        ({"mode": "balanced"}, 14, 1),  # too few samples to share
        ({"mode": "balanced", "micro_batches": 12}, 48, 6),
        ({"mode": "balanced", "speeds": [1, 0.6]}, 48, 4),  # 3 would cost 7 %, 4 nothing
    ],
)
def test_a_global_batch_is_cut_as_finely_as_its_workers_need(
    parallel: dict[str, Any], batch: int, split: int
) -> None:
    assert _config(batch, parallel).split((), 1) == split


@pytest.mark.parametrize(
    ("speeds", "present", "split"),
    [
        ([1, 1, 1, 1], 1, 1),
        ([1, 1, 1, 0.943], 1, 1),  # a ratio of 1.06, but 4.5 % at most to be saved
        ([1, 1, 1, 0.9], 1, 1),  # 17 of 64 micro-batches in place of 16 / 0.9: 4.4 % less
        ([1, 1, 1, 0.85], 1, 16),  # in place of 16 / 0.85: 9.7 % less
        ([1, 1, 1, 0.9], 16, 16),
        ([1, 1, 1, 1], 16, 1),
    ],
)
def test_auto_balances_where_that_saves_more_than_a_twentieth_of_a_step(
    speeds: list[float], present: int, split: int
) -> None:
    """And ends where nothing is left to save, so that it does not turn back and forth."""
    config = _config(4 * 128, {"mode": "auto"}, workers=4)
    assert config.split(speeds, present) == split


def test_workers_that_cannot_share_their_samples_are_reported_with_what_to_change() -> None:
    speeds = [1, 1, 1, 0.6]
    assert _config(4 * 32, {"mode": "balanced"}, workers=4).imbalance(speeds) is None
    text = _config(4 * 31, {"mode": "balanced"}, workers=4).imbalance(speeds)
    assert text is not None
    assert "takes 50% longer" in text
    assert "such as 128," in text
    given = {"mode": "balanced", "micro_batches": 16}
    text = _config(4 * 32, given, workers=4).imbalance(speeds)
    assert text is not None
    assert "raise parallel.micro_batches" in text


def _config(batch: int, parallel: dict[str, Any], workers: int = 2) -> LearnerConfig:
    values = {"global_batch_size": batch, "parallel": parallel, "workers": {"count": workers}}
    return LearnerConfig.from_job(parse_job({**GOOD, **values}))
