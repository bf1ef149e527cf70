"""How often groups of workers are started; Ray Train is a list of how they end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train import PreemptionError, WorkerGroupError

from raytrain_opt.cluster.resources import PoolPlan
from raytrain_opt.config.schema import TimeoutsSection
from raytrain_opt.pools import train_and_tune
from raytrain_opt.pools.programs import ResidentConfig
from raytrain_opt.pools.train_and_tune import run_workers
from raytrain_opt.train.learner_config import LearnerConfig
from tests.support.small_jobs import small_job

DEATH = WorkerGroupError("killed", {})
PREEMPTION = PreemptionError(SimpleNamespace(preempted_ranks=[0]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ends", "survives"),
    [([DEATH] * 2, True), ([DEATH] * 3, False), ([PREEMPTION] * 5 + [DEATH] * 2, True)],
    ids=["few deaths", "too many deaths", "preemptions"],
)
def test_deaths_of_elastic_workers_are_limited_preemptions_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: list[Exception], survives: bool
) -> None:
    config = ResidentConfig(
        learner=LearnerConfig.from_job(small_job(tmp_path)),
        candidate_batch=None,
        plan=PoolPlan(False, 2, 2, {"CPU": 1.0}),
        min_workers=1,
        threads=1,
        max_restarts=2,
        timeouts=TimeoutsSection(),
        run_id="run",
        mailbox=SimpleNamespace(is_closed=SimpleNamespace(remote=lambda _: True)),
        ray_storage_path=str(tmp_path),
    )
    groups: Iterator[Exception] = iter(ends)

    def fit() -> None:
        if error := next(groups, None):
            raise error

    def trainer(**_: Any) -> Any:
        return SimpleNamespace(fit=fit)

    monkeypatch.setattr(train_and_tune, "count_placeable", lambda *_: 2)
    monkeypatch.setattr(train_and_tune.ray, "get", lambda reply: reply)
    if survives:
        run_workers(config, trainer)
    else:
        with pytest.raises(WorkerGroupError):
            run_workers(config, trainer)
