"""`resume: auto`: which run a job resumes, and which it refuses."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from raytrain_opt.config.load import dump_job
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import JobError, StorageError
from raytrain_opt.execution.resolve import Placement, settle
from raytrain_opt.execution.resume import check_continues, find_run, job_fields
from raytrain_opt.execution.workspace import how_to_resume
from raytrain_opt.paths import ENDING, RunPaths, mark_ended
from raytrain_opt.storage import join, write, write_json
from tests.support.s3_server import S3Server
from tests.support.synthetic_runs import batch_size, epoch_line

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
    return Job.model_validate({**values, **changes})


def settled(settled_job: Job, batch_size: int = 8) -> Job:
    """Return the job as a run on one worker writes it."""
    return settle(settled_job, Placement(1, None), batch_size)


def found_run(unfinished_job: Job) -> str | None:
    return find_run(unfinished_job, None)[1]


def make_run(storage: object, run_id: str, started_with: Job, *files: str) -> str:
    """Make a run directory with the job as a run writes it and these other files."""
    run_dir = join(str(storage), run_id)
    write(
        run_dir,
        "job.yaml",
        dump_job(settled(started_with, started_with.global_batch_size)).encode(),
    )
    for name in files:
        write(run_dir, name, b'{"checkpoints": []}')
    return run_dir


TIMED: dict[str, Any] = {"epochs": None, "train_for": "1h"}
TIMED["learning_rate"] = {"policy": "schedule", "shape": "linear"}
SAVED, FINISHED = ("checkpoints/index.json",), ("checkpoints/index.json", "result.json")


@pytest.fixture(params=["folder", "URI"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, s3: S3Server) -> str:
    return s3.new_uri() if request.param == "URI" else f"{tmp_path}/runs"


def test_the_newest_unfinished_run_of_the_name_is_resumed(storage: str) -> None:
    unfinished_job = job(storage)
    make_run(storage, "r-20260102-000000-aaaaaaaaaaaaaaaa", unfinished_job, *SAVED)
    newest = make_run(storage, "r-20260103-000000-0000000000000000", unfinished_job, *SAVED)
    make_run(storage, "r-20260104-000000-aaaaaaaaaaaaaaaa", unfinished_job, *FINISHED)
    # It died before its first checkpoint.
    make_run(storage, "r-20260105-000000-aaaaaaaaaaaaaaaa", unfinished_job)
    make_run(storage, "r-more-20260106-000000-aaaaaaaaaaaaaaaa", unfinished_job, *SAVED)
    make_run(storage, "r-20260107-000000-aaaaaaaaaaaaaaaa.old", unfinished_job, *SAVED)
    assert found_run(unfinished_job) == newest
    assert RunPaths.existing(newest, write=False).shown == newest


def test_without_an_unfinished_run_a_new_one_is_started(storage: str) -> None:
    assert found_run(job(storage)) is None
    make_run(storage, "r-20260101-000000-aaaaaaaaaaaaaaaa", job(storage), *FINISHED)
    assert found_run(job(storage)) is None


def test_a_run_whose_command_was_killed_after_its_result_is_found(storage: str) -> None:
    """As while Ray shuts down; a new run would train once more."""
    files = (*FINISHED, ENDING)
    run_dir = make_run(storage, "r-20260101-000000-aaaaaaaaaaaaaaaa", job(storage), *files)
    assert found_run(job(storage)) == run_dir
    for _ in range(2):
        mark_ended(run_dir)
        assert found_run(job(storage)) is None


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({}, None),
        ({"checkpoint": {"keep": 5}}, None),
        ({"epochs": 9}, None),
        ({"epochs": 2}, "epochs: must be more than the 2 epochs"),
        ({"seed": 1}, r"job.yaml: of .* was edited since .*seed: is 0 in that run"),
        ({"seed": 1, "epochs": 9}, r"job.yaml: of .* was edited since .*seed: is 0 in that run"),
    ],
)
def test_an_edited_job_is_compared_with_the_one_of_the_checkpoint(
    tmp_path: Path, edits: dict[str, Any], message: str | None
) -> None:
    trained = job(tmp_path, workers={"count": 1})
    edited = job(tmp_path, workers={"count": 1}, **edits)
    run_dir = make_run(tmp_path, "r-20260101-000000-aaaaaaaaaaaaaaaa", edited, *SAVED)
    write(run_dir, "epochs.jsonl", epochs(2))
    same, _ = find_run(edited, run_dir)
    with nullcontext() if message is None else pytest.raises(JobError, match=f"(?s){message}"):
        check_continues(same, job_fields(trained), run_dir, is_edited=True)


def test_a_job_resumes_only_when_it_says_so(tmp_path: Path) -> None:
    assert Job.model_fields["resume"].default == "never"
    unfinished_job = job(tmp_path)
    make_run(tmp_path, "r-20260101-000000-aaaaaaaaaaaaaaaa", unfinished_job, *SAVED)
    assert found_run(unfinished_job.model_copy(update={"resume": "never"})) is None


def test_another_job_is_refused_with_the_fields_that_differ(storage: str) -> None:
    run_dir = make_run(storage, "r-20260101-000000-aaaaaaaaaaaaaaaa", job(storage), *SAVED)
    schedule = {"policy": "schedule", "shape": "linear"}
    other = job(storage, model="small_cnn", learning_rate=schedule)
    with pytest.raises(JobError) as caught:
        found_run(other)
    message = str(caught.value)
    assert f"resume: continues {run_dir}, in which only epochs, " in message
    assert "resume that run unchanged: raytrain-opt run --resume " in message
    assert "or start a new run: --set resume=never" in message
    assert "model.args.width: is 4 in that run (given: not set)" in message
    assert "learning_rate.policy: is 'stpt' in that run (given: 'schedule')" in message
    assert "learning_rate.shape: is not set in that run (given: 'linear')" in message
    assert "data" not in {problem.path.split(".")[0] for problem in caught.value.problems}
    assert caught.value.exit_code == 2


def epochs(count: int, planned: int = 3) -> bytes:
    lines = [{"schema_version": 1, **epoch_line(n, epochs=planned)} for n in range(1, count + 1)]
    return "".join(f"{json.dumps(line)}\n" for line in lines).encode()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seed": 1}, "seed"),
        ({"seed": 1, "epochs": 9}, "seed"),
        ({"global_batch_size": 16}, "global_batch_size"),
        ({"optimizer": "AdamW"}, "optimizer.name"),
        ({"model": {"name": "small_cnn", "args": {"width": 5}}}, "model.args.width"),
        ({"learning_rate": {"policy": "stpt", "candidates": [1.0, 0.4]}}, "learning_rate.cand"),
        ({"data": {"name": "digits", "validation_fraction": 0.2}}, "data.validation_fraction"),
        ({"workers": {"count": 2}}, "workers.count"),
        ({"precision": "bf16"}, "precision"),
    ],
)
def test_a_run_that_is_named_continues_its_own_job(
    storage: str, changes: dict[str, Any], field: str
) -> None:
    """From Python and from the command line, which gives the job of the run with `--set`."""
    began = job(storage)
    run_dir = make_run(storage, "r-20260101-000000-aaaaaaaaaaaaaaaa", began, *SAVED)
    write(run_dir, "epochs.jsonl", epochs(2))
    find_run(began, run_dir)
    with pytest.raises(JobError, match=rf"(?s)resume: continues .* can change.*{field}.*: is"):
        find_run(job(storage, **changes), run_dir)


@pytest.mark.parametrize(
    ("before", "changes", "files", "message"),
    [
        ({}, {}, SAVED, None),
        ({}, {}, FINISHED, "--resume: has finished.* --set epochs=N"),
        ({}, {"checkpoint": {"keep": 5}}, FINISHED, "--resume: has finished"),
        ({}, {"epochs": 9}, FINISHED, None),
        ({}, {"epochs": 9}, SAVED, None),
        ({}, {"epochs": 2}, SAVED, "epochs: must be more than the 3 epochs"),
        ({"epochs": 5}, {"epochs": 5, "stop": {"patience": 2}}, FINISHED, None),
        ({}, {"stop": {"patience": 2}}, FINISHED, "epochs: must be more than the 3 epochs"),
        (
            {**TIMED, "epochs": 5, "train_for": None},
            TIMED,
            SAVED,
            "train_for: plans no more epochs",
        ),
        (TIMED, {**TIMED, "train_for": "2h"}, SAVED, None),
        (TIMED, {**TIMED, "train_for": "2h"}, FINISHED, "train_for: plans no more epochs"),
        (TIMED, {"learning_rate": TIMED["learning_rate"], "epochs": 9}, FINISHED, None),
    ],
)
def test_a_run_may_get_another_length(
    storage: str,
    before: dict[str, Any],
    changes: dict[str, Any],
    files: tuple[str, ...],
    message: str | None,
) -> None:
    run_id = "r-20260101-000000-aaaaaaaaaaaaaaaa"
    run_dir = make_run(storage, run_id, job(storage, **before), *files)
    write(run_dir, "epochs.jsonl", epochs(3))
    with nullcontext() if message is None else pytest.raises(JobError, match=message):
        find_run(job(storage, **changes), run_dir)


def test_the_length_stays_while_the_search_that_belongs_to_it_is_not_complete(
    storage: str,
) -> None:
    run_dir = make_run(storage, "r-20260101-000000-aaaaaaaaaaaaaaaa", job(storage), *SAVED)
    with pytest.raises(JobError, match="epochs: cannot change before epoch 1 of .* is complete"):
        find_run(job(storage, epochs=9), run_dir)


def test_what_a_resumed_run_may_change_is_not_another_job(tmp_path: Path) -> None:
    """Also if it was changed before, by `--resume RUN_DIR --set`."""
    changes: dict[str, Any] = {
        "checkpoint": {"keep": 5},
        "max_restarts": 7,
        "timeouts": {"no_progress_s": 3600},
        "workers": {"resources": {"GPU": 0.5}},
        "data": {"name": "digits", "root": "/moved"},
    }
    run_id = "r-20260101-000000-aaaaaaaaaaaaaaaa"
    run_dir = make_run(tmp_path, run_id, job(tmp_path, **changes), *SAVED)
    assert found_run(job(tmp_path)) == run_dir


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
def test_a_searched_batch_size_is_not_another_job(tmp_path: Path, changes: dict[str, Any]) -> None:
    """After its search, a run writes the job with the batch size that was found."""
    unfinished_job = job(tmp_path, **changes)
    run_id = "r-20260101-000000-aaaaaaaaaaaaaaaa"
    run_dir = make_run(tmp_path, run_id, settled(unfinished_job, 48), *SAVED)
    write_json(tmp_path / run_id / "batch_size.json", batch_size(batch_size_per_worker=48))
    assert found_run(unfinished_job) == run_dir
    rate = {**unfinished_job.learning_rate.model_dump(), "initial": 0.7}
    faster = job(tmp_path, **{**changes, "learning_rate": rate})
    with pytest.raises(JobError, match=r"learning_rate\.initial: is [01]\.\d+ in that run"):
        found_run(faster)


def test_storage_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        found_run(job(tmp_path / "file"))


@pytest.mark.parametrize(("rounds", "reached"), [(0, "epoch 3"), (2, "round 2 of epoch 4")])
def test_an_interrupted_run_says_how_far_it_is_saved(
    tmp_path: Path, rounds: int, reached: str
) -> None:
    paths = RunPaths(tmp_path)
    plain = job(tmp_path)
    assert "no checkpoint was saved yet" in how_to_resume(paths, plain)
    paths.checkpoints.mkdir()
    entry = {"epoch": 3, "rounds": rounds, "score": None, "sha256": {}}
    write_json(paths.checkpoints / "index.json", {"checkpoints": [entry]})
    assert how_to_resume(paths, plain) == (
        f"saved through {reached}; resume with: raytrain-opt run --resume {tmp_path}"
    )
    own = job(tmp_path, model="my.models:net")
    assert how_to_resume(paths, own).endswith(f"--resume {tmp_path} --trust")


def test_a_resumed_run_keeps_its_workers_and_threads(storage: str) -> None:
    began = settle(job(storage), Placement(4, 3), 8)
    run_dir = make_run(storage, "r-20260103-000000-0000000000000000", began, *SAVED)
    kept, found = find_run(job(storage), None)
    assert (kept.workers.count, kept.workers.threads, found) == (4, 3, run_dir)
    own, _ = find_run(job(storage, workers={"threads": 1}, resume="never"), None)
    assert (own.workers.count, own.workers.threads) == ("auto", 1)
    with pytest.raises(JobError, match=r"workers\.threads"):
        find_run(job(storage, workers={"threads": 1}), None)
    with pytest.raises(JobError, match=r"workers\.count"):
        find_run(job(storage, workers={"count": 2}), None)
