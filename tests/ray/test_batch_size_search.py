"""The batch-size search on a real local Ray: probes, processes, records, the run after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_jobs import read_lines, small_job

from raytrain_opt import find_batch_size, load_job, run
from raytrain_opt.batch_size import BatchSizeResult
from raytrain_opt.errors import MemberError

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(600)]

SEARCH = {
    "strategy": "throughput_knee",
    "start": 16,
    "max_batch_size": 64,
    "precision": 0.3,
    "max_seconds": 0.3,
    "max_probes": 4,
    "memory_reserve": 0.0,
}


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def job(storage: Path, search: dict[str, Any] | None = None, **changes: Any) -> Any:
    plain = {"policy": "schedule", "initial": 0.1, "shape": "constant"}
    changes = {"epochs": 1, "learning_rate": plain, **changes}
    return small_job(storage, batch_size_search={**SEARCH, **(search or {})}, **changes)


@pytest.fixture(scope="module")
def found(local_ray: None, storage: Path) -> BatchSizeResult:
    """One whole search, looked at by many tests."""
    return find_batch_size(job(storage), trace=True)


def test_one_process_probes_and_a_fresh_one_checks(found: BatchSizeResult) -> None:
    lines = read_lines(found.run_dir, "batch_size")
    *probes, check = lines
    assert len(probes) > 1
    assert len({line["pid"] for line in probes}) == 1
    assert check["check"]
    assert check["pid"] != probes[0]["pid"]
    assert check["batch_size"] == found.batch_size
    assert found.batch_size in {line["batch_size"] for line in probes}
    assert check["steps"] >= 3 * 5


def test_probes_are_recorded_with_their_parts(found: BatchSizeResult) -> None:
    for line in read_lines(found.run_dir, "batch_size"):
        assert line["status"] == "ok"
        assert line["samples_per_s"] > 0
        parts_s = sum(line["parts_s"].values()) * line["steps"]
        assert parts_s == pytest.approx(line["seconds"])
        assert 0 < line["utilization_pct"] <= 100
        assert line["reason"]


def test_the_job_that_is_left_trains_with_the_choice(found: BatchSizeResult) -> None:
    left = load_job(Path(found.run_dir) / "job.yaml")
    assert left.global_batch_size == 2 * found.batch_size
    factor = left.global_batch_size / 64
    assert left.learning_rate.model_dump()["initial"] == pytest.approx(0.1 * factor)
    assert left.batch_size_search is None
    summary = json.loads((Path(found.run_dir) / "batch_size.json").read_text())
    assert summary["global_batch_size"] == {"from": 64, "to": left.global_batch_size}


def test_the_trace_shows_the_training_steps(found: BatchSizeResult) -> None:
    trace = json.loads((Path(found.run_dir) / "trace.json").read_text())
    assert any("conv" in str(event.get("name")) for event in trace["traceEvents"])


def test_a_run_takes_the_kept_answer(
    found: BatchSizeResult, storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(job(storage))
    assert "--fresh" in capsys.readouterr().out
    assert len(read_lines(result.run_dir, "batch_size")) == len(found.answer.probes)
    assert load_job(Path(result.run_dir) / "job.yaml").global_batch_size == 2 * found.batch_size
    epoch = read_lines(result.run_dir, "epochs")[0]
    assert epoch["samples"] % (2 * found.batch_size) == 0


def test_a_process_that_ran_out_of_memory_is_not_used_again(storage: Path) -> None:
    model = "small_jobs:make_model_for_16_samples"
    answer = find_batch_size(job(storage, {"max_probes": 3, "start": 8}, model=model))
    assert answer.batch_size <= 16
    *probes, _ = read_lines(answer.run_dir, "batch_size")
    failed = [i for i, line in enumerate(probes) if line["status"] == "out_of_memory"]
    assert failed
    for at in failed:
        after = [line["pid"] for line in probes[at + 1 :]]
        assert probes[at]["pid"] not in after


def test_an_error_of_the_users_code_is_told(storage: Path) -> None:
    with pytest.raises(MemberError, match="planted failure"):
        find_batch_size(job(storage, model="small_jobs:make_breaking_model"))
