"""A pipeline of Ray Data on a real local Ray, with the default policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_opt import load_job, run
from tests.support.small_jobs import read_lines

JOB = Path(__file__).parents[3] / "jobs" / "ray_data.yaml"


@pytest.mark.usefixtures("local_ray")
@pytest.mark.timeout(600)
# Ray warns of settings of its own.
@pytest.mark.filterwarnings("ignore:.* is deprecated:DeprecationWarning:ray.data")
def test_two_workers_train_and_search_on_ray_datasets(tmp_path: Path) -> None:
    job = load_job(JOB, [f"storage_path={tmp_path}", "epochs=4", "optimizer=SGD"])
    result = run(job)
    assert result.test_metric is not None
    assert result.test_metric > 0.9
    epochs = read_lines(result.run_dir, "epochs")
    assert [line["samples"] for line in epochs] == [29 * 50] * 4
    assert [line["test_samples"] for line in epochs] == [300] * 4
    rounds = read_lines(result.run_dir, "rounds")
    assert {line["search_on"] for line in rounds} == {"workers"}
