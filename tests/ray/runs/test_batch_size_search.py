"""The batch-size search on a real local Ray: probes, processes, records, the job after it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from raytrain_opt import Job, find_batch_size
from raytrain_opt.errors import JobError
from raytrain_opt.execution.batch_size import BatchSizeResult
from tests.support.small_jobs import read_lines, small_job

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(600)]

SEARCH: dict[str, Any] = {
    "strategy": "throughput_knee",
    "initial": 8,
    "max_batch_size": 64,
    "max_probe_s": 0.3,
    "memory_reserve": 0.0,
}


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def job(storage: Path, **changes: Any) -> Job:
    plain = {"policy": "schedule", "initial": 0.1, "shape": "constant"}
    model = "tests.support.small_jobs:make_model_for_16_samples"
    changes = {"epochs": 1, "learning_rate": plain, "model": model, **changes}
    return small_job(storage, batch_size_search=SEARCH, **changes)


@pytest.fixture(scope="module")
def search(local_ray: Cluster, storage: Path) -> BatchSizeResult:
    """Run one search for many tests."""
    return find_batch_size(job(storage))


def test_a_process_probes_until_it_runs_out_of_memory_and_a_fresh_one_checks(
    search: BatchSizeResult,
) -> None:
    *lines, check = read_lines(search.run_dir, "batch_size")
    probes = [line for line in lines if not line["check"]]  # a noisy check may be repeated
    assert len(probes) > 2
    assert probes[0]["pid"] == probes[1]["pid"]
    failed = [i for i, line in enumerate(probes) if line["status"] == "out_of_memory"]
    assert failed
    for i, (line, following) in enumerate(pairwise(probes)):
        assert (line["pid"] == following["pid"]) == (i not in failed)
    assert check["check"]
    assert check["pid"] not in {line["pid"] for line in probes}
    assert check["batch_size"] == search.batch_size <= 16
    assert search.batch_size in {line["batch_size"] for line in probes}
    # Three times the steps of a probe, or its time on a machine that is busy.
    assert check["steps"] >= 3 * 5 or check["duration_s"] >= 3 * SEARCH["max_probe_s"]


def test_probes_are_recorded_with_their_timings(search: BatchSizeResult) -> None:
    for line in read_lines(search.run_dir, "batch_size"):
        assert line["reason"]
        assert line["status"] == ("ok" if line["batch_size"] <= 16 else "out_of_memory")
        if line["status"] == "ok":
            assert line["samples_per_s"] > 0
            timings_s = sum(line["timings_s"].values()) * line["steps"]
            assert timings_s == pytest.approx(line["duration_s"])
            assert 0 < line["utilization_pct"] <= 100


def test_an_error_of_the_users_code_is_reported(storage: Path) -> None:
    with pytest.raises(JobError, match="planted failure"):
        find_batch_size(job(storage, model="tests.support.small_jobs:make_breaking_model"))
