"""The batch-size search on a real local Ray: probes, processes, records, the job after it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from raytrain_opt import find_batch_size
from tests.support.small_jobs import read_lines, small_job

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(600)]

SEARCH: dict[str, Any] = {
    "strategy": "throughput_knee",
    "initial": 8,
    "max_batch_size": 64,
    "max_probe_s": 0.3,
    "memory_reserve": 0.0,
}


def test_a_process_probes_until_it_runs_out_of_memory_and_a_fresh_one_checks(
    tmp_path: Path,
) -> None:
    plain = {"policy": "schedule", "initial": 0.1, "shape": "constant"}
    model = "tests.support.small_jobs:make_model_for_16_samples"
    changes: dict[str, Any] = {"epochs": 1, "learning_rate": plain, "model": model}
    search = find_batch_size(small_job(tmp_path, batch_size_search=SEARCH, **changes))
    lines = read_lines(search.run_dir, "batch_size")
    # A noisy check may be repeated, or ask for more probes.
    checks = [number for number, line in enumerate(lines) if line["check"]]
    probes, check = lines[: checks[0]], lines[checks[-1]]
    assert len(probes) > 2
    assert probes[0]["pid"] == probes[1]["pid"]
    failed = [i for i, line in enumerate(probes) if line["status"] == "out_of_memory"]
    assert failed
    for i, (line, following) in enumerate(pairwise(probes)):
        assert (line["pid"] == following["pid"]) == (i not in failed)
    assert lines[checks[0]]["pid"] not in {line["pid"] for line in probes}
    assert check["batch_size"] == search.batch_size <= 16
    assert search.batch_size in {line["batch_size"] for line in lines if not line["check"]}
    for line in lines:
        assert line["reason"]
        assert line["status"] == ("ok" if line["batch_size"] <= 16 else "out_of_memory")
        if line["status"] == "ok":
            timings_s = sum(line["timings_s"].values()) * line["steps"]
            assert timings_s == pytest.approx(line["duration_s"])
            assert 0 < line["utilization_pct"] <= 100
