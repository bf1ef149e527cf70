"""`resume: auto`: which run a job goes on with, and which it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytrain_opt.batch_size import with_choice, with_scaled_lr
from raytrain_opt.config.load import dump_job, parse_job
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import CommitError, JobError
from raytrain_opt.paths import RunPaths, newest_unfinished, write_json, write_text
from raytrain_opt.resume import unfinished_run
from raytrain_opt.start import how_to_resume

SEARCH = {"strategy": "throughput_knee", "lr_rule": "linear"}


def job(storage: object, **changes: Any) -> Job:
    values = {
        "name": "r",
        "model": {"name": "small_cnn", "args": {"width": 4}},
        "data": "digits",
        "epochs": 3,
        "global_batch_size": 8,
        "learning_rate": {"policy": "stpt", "candidates": [1.0, 0.5]},
        "storage_path": str(storage),
        "resume": "auto",
    }
    return parse_job({**values, **changes})


def left(storage: object, run_id: str, started_with: Job, *files: str) -> str:
    """A run directory with the job as a run writes it and these other files."""
    folder = Path(str(storage).removeprefix("file://")) / run_id
    (folder / "checkpoints").mkdir(parents=True)
    write_text(folder / "job.yaml", dump_job(started_with))
    for name in files:
        write_json(folder / name, {"commits": []})
    return f"{storage}/{run_id}"


COMMITTED, FINISHED = ("checkpoints/index.json",), ("checkpoints/index.json", "result.json")


@pytest.fixture(params=["", "file://"], ids=["folder", "URI"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.param}{tmp_path}/runs"


def test_the_newest_unfinished_run_of_the_name_is_gone_on_with(storage: str) -> None:
    mine = job(storage)
    left(storage, "r-20260102-000000-aaaa", mine, *COMMITTED)
    newest = left(storage, "r-20260103-000000-0000", mine, *COMMITTED)
    left(storage, "r-20260104-000000-aaaa", mine, *FINISHED)
    left(storage, "r-20260105-000000-aaaa", mine)  # it died before its first commit
    left(storage, "r-more-20260106-000000-aaaa", mine, *COMMITTED)
    left(storage, "r-20260107-000000-aaaa.old", mine, *COMMITTED)
    assert unfinished_run(mine) == newest
    assert RunPaths.existing(newest).shown == newest


def test_the_directory_of_a_run_is_recognised(tmp_path: Path) -> None:
    """Whatever stands in the name that means something in a pattern."""
    run = RunPaths.create(str(tmp_path), "a.b-1")
    write_json(run.checkpoints / "index.json", {"commits": []})
    assert newest_unfinished(str(tmp_path), "a.b-1") == run.shown
    assert newest_unfinished(str(tmp_path), "a-b-1") is None


def test_without_an_unfinished_run_a_new_one_is_started(storage: str) -> None:
    assert unfinished_run(job(storage)) is None
    left(storage, "r-20260101-000000-aaaa", job(storage), *FINISHED)
    assert unfinished_run(job(storage)) is None


def test_a_job_goes_on_only_when_it_says_so(tmp_path: Path) -> None:
    assert Job.model_fields["resume"].default == "never"
    mine = job(tmp_path)
    left(tmp_path, "r-20260101-000000-aaaa", mine, *COMMITTED)
    assert unfinished_run(mine.model_copy(update={"resume": "never"})) is None


def test_where_it_is_and_whether_it_was_to_be_resumed_make_no_other_job(tmp_path: Path) -> None:
    before = job("elsewhere", resume="never")
    found = left(tmp_path, "r-20260101-000000-aaaa", before, *COMMITTED)
    assert unfinished_run(job(tmp_path)) == found


def test_another_job_is_refused_with_the_fields_that_differ(storage: str) -> None:
    found = left(storage, "r-20260101-000000-aaaa", job(storage), *COMMITTED)
    schedule = {"policy": "schedule", "shape": "linear"}
    other = job(storage, model="small_cnn", epochs=5, learning_rate=schedule)
    with pytest.raises(JobError) as caught:
        unfinished_run(other)
    message = str(caught.value)
    assert f"resume: auto finds the unfinished run {found}" in message
    assert f"raytrain-opt run --resume {found}" in message
    assert "--set resume=never" in message
    assert "epochs: is 3 in that run (given: 5)" in message
    assert "model.args.width: is 4 in that run (given: not set)" in message
    assert "learning_rate.policy: is 'stpt' in that run (given: 'schedule')" in message
    assert "learning_rate.shape: is not set in that run (given: 'linear')" in message
    assert "data" not in {problem.path.split(".")[0] for problem in caught.value.problems}
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size_search": SEARCH},
        {"batch_size_search": {**SEARCH, "lr_rule": "none"}},
        {
            "batch_size_search": SEARCH,
            "learning_rate": {"policy": "schedule", "scaling": {"reference_batch_size": 4}},
        },
    ],
    ids=["linear", "none", "scaling"],
)
@pytest.mark.parametrize("is_settled", [True, False])
def test_a_batch_size_that_was_found_makes_no_other_job(
    tmp_path: Path, changes: dict[str, Any], is_settled: bool
) -> None:
    """A run writes its job down with what the search found, once it has."""
    mine = job(tmp_path, **changes)
    settled = with_scaled_lr(with_choice(mine, 48))
    assert settled != mine
    run_id = "r-20260101-000000-aaaa"
    found = left(tmp_path, run_id, settled if is_settled else mine, *COMMITTED)
    write_json(tmp_path / run_id / "batch_size.json", {"batch_size_per_worker": 48})
    assert unfinished_run(mine) == found
    rate = {**mine.learning_rate.model_dump(), "initial": 0.7}
    faster = job(tmp_path, **{**changes, "learning_rate": rate})
    with pytest.raises(JobError, match=r"learning_rate\.initial: is [01]\.\d+ in that run"):
        unfinished_run(faster)


def test_a_scaled_rate_makes_no_other_job(tmp_path: Path) -> None:
    scaled = {"policy": "schedule", "scaling": {"reference_batch_size": 4}}
    mine = job(tmp_path, learning_rate=scaled)
    found = left(tmp_path, "r-20260101-000000-aaaa", with_scaled_lr(mine), *COMMITTED)
    assert unfinished_run(mine) == found


def test_storage_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CommitError, match="file"):
        unfinished_run(job(tmp_path / "file"))


@pytest.mark.parametrize(("rounds", "reached"), [(0, "epoch 3"), (2, "round 2 of epoch 4")])
def test_who_stops_a_run_is_told_how_far_it_is_kept(
    tmp_path: Path, rounds: int, reached: str
) -> None:
    paths = RunPaths(tmp_path)
    assert "nothing was committed yet" in how_to_resume(paths)
    paths.checkpoints.mkdir()
    entry = {"epoch": 3, "rounds": rounds, "test_accuracy": None, "sha256": {}}
    write_json(paths.checkpoints / "index.json", {"commits": [entry]})
    assert how_to_resume(paths) == (
        f"kept up to {reached}; go on with: raytrain-opt run --resume {tmp_path}"
    )
