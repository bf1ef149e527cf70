"""`resume: auto`: which earlier run a job goes on with, so that the same command can be given
again until the training is done.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from raytrain_opt.batch_size import with_choice, with_scaled_lr
from raytrain_opt.config.load import parse_job, plain_job
from raytrain_opt.config.messages import shown
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.paths import newest_unfinished, read_stored

# They say where runs are and which one is wanted, not what a run does.
_NOT_COMPARED = ("storage_path", "resume")
_ABSENT = object()


def unfinished_run(job: Job) -> str | None:
    """The directory of the newest run of this name that has commits and no result; None when there
    is none, or when the job wants a new run.

    Raises JobError when that run was started with another job: its numbers would be those of
    neither.
    """
    run_dir = newest_unfinished(job.storage_path, job.name) if job.resume == "auto" else None
    if run_dir is not None:
        _refuse_another_job(job, run_dir)
    return run_dir


def _refuse_another_job(job: Job, run_dir: str) -> None:
    text = (read_stored(run_dir, "job.yaml") or b"").decode(errors="replace")
    found = parse_job(text, f"{run_dir}/job.yaml")
    now, then = (_fields(plain_job(_settled(each, run_dir))) for each in (job, found))
    problems = [
        Problem(key, f"is {_value(then, key)} in that run", _value(now, key))
        for key in {**now, **then}
        if now.get(key, _ABSENT) != then.get(key, _ABSENT) and key not in _NOT_COMPARED
    ]
    if problems:
        raise JobError([_choices(run_dir), *problems])


def _choices(run_dir: str) -> Problem:
    rule = f"auto finds the unfinished run {run_dir}, which was started with another job"
    hint = (
        "give the fields below their values of that run, or go on with it as it was: raytrain-opt "
        f"run --resume {run_dir}, or start a new run: --set resume=never, or another name"
    )
    return Problem("resume", rule, hint=hint)


def _settled(job: Job, run_dir: str) -> Job:
    """As the run writes it down: with the batch size that was found, and what follows."""
    found = read_stored(run_dir, "batch_size.json") if job.batch_size_search else None
    if found is not None:
        job = with_choice(job, json.loads(found)["batch_size_per_worker"])
    return with_scaled_lr(job)


def _fields(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value by its dotted path."""
    fields: dict[str, Any] = {}
    for key, value in section.items():
        path = f"{prefix}{key}"
        fields |= _fields(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return fields


def _value(fields: Mapping[str, Any], key: str) -> str:
    return shown(fields[key]) if key in fields else "not set"
