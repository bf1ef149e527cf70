"""`resume: auto`: find the unfinished run of a job, so that a command can be repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any

from raytrain_opt import storage
from raytrain_opt.config.error_messages import shown
from raytrain_opt.config.functions import refuse_functions
from raytrain_opt.config.load import flatten, parse_job, plain_job
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.execution.rescale import apply_batch_size, resolve_lr_scaling, set_worker_count
from raytrain_opt.paths import check_run, newest_unfinished
from raytrain_opt.recording.reader import read_record, read_text
from raytrain_opt.recording.records import BatchSizeRecord

_ABSENT = object()
# They change when a run gives up, what it keeps and where it runs, not what it computes.
_HARMLESS = ("checkpoint.", "max_restarts", "timeouts.", "workers.resources")
# Nor do these: where runs are and which of them is resumed.
_NOT_COMPARED = (*_HARMLESS, "storage_path", "resume")


def refuse_changes(overrides: Sequence[str]) -> None:
    """Raise JobError naming each `--set` that could change the numbers of a resumed run."""
    paths = (override.partition("=")[0].strip() for override in overrides)
    rule = f"cannot change in a resumed run; only {', '.join(_HARMLESS)} can"
    problems = [Problem(f"--set {path}", rule) for path in paths if not path.startswith(_HARMLESS)]
    if problems:
        raise JobError(problems, "arguments")


def load_run_job(run_dir: str, overrides: Sequence[str], *, trust: bool) -> Job:
    """Load the job of a run that is resumed; under a URI, nothing else is fetched for that.

    Without `trust`, a job that names functions is refused before one of them is imported.
    """
    refuse_changes(overrides)
    check_run(run_dir)
    if storage.read(run_dir, "result.json") is not None:
        rule = f"has finished; see {storage.join(run_dir, 'report.html')}"
        raise JobError([Problem("--resume", rule, repr(run_dir))], "arguments")
    job = _read_job(run_dir, overrides)
    if not trust:
        refuse_functions(job.functions, run_dir)
    return job


def resume_command(run_dir: str, job: Job, options: str = "") -> str:
    """Return the command, with further `options`, or the call that resumes the run of the job."""
    if any(getattr(f, "__module__", f) == "__main__" for _, f in job.functions):
        in_process = ", in_process=True" if options == "--in-process" else ""
        return f"run(job, resume={run_dir!r}{in_process}) in the script that defines its functions"
    # Quoted for a shell: options of a URI contain &.
    words = ["raytrain-opt run --resume", quote(run_dir), "--trust" if job.functions else ""]
    return " ".join(filter(None, [*words, options]))


def find_unfinished_run(job: Job) -> str | None:
    """Return the run for `resume: auto` to resume, if any. Raises JobError if its job differs."""
    run_dir = newest_unfinished(job.storage_path, job.name) if job.resume == "auto" else None
    if run_dir is not None:
        _refuse_another_job(job, run_dir)
    return run_dir


def keep_worker_count(job: Job, run_dir: str | None) -> Job:
    """Return the job; `workers.count: auto` becomes the number with which that run began."""
    if run_dir is None or job.workers.count != "auto":
        return job
    return set_worker_count(job, _read_job(run_dir).workers.size)


def _read_job(run_dir: str, overrides: Sequence[str] = ()) -> Job:
    text, source = read_text(run_dir, "job.yaml"), storage.join(run_dir, "job.yaml")
    if text is None:
        raise JobError([Problem("the file", "does not exist")], source)
    return parse_job(text, source, overrides)


def _refuse_another_job(job: Job, run_dir: str) -> None:
    unfinished = _read_job(run_dir)
    now, then = (flatten(plain_job(_resolve(j, run_dir))) for j in (job, unfinished))
    problems = [
        Problem(key, f"is {_value_text(then, key)} in that run", _value_text(now, key))
        for key in {**now, **then}
        if now.get(key, _ABSENT) != then.get(key, _ABSENT) and not key.startswith(_NOT_COMPARED)
    ]
    if problems:
        raise JobError([_remedies(run_dir, unfinished), *problems])


def _remedies(run_dir: str, job: Job) -> Problem:
    rule = f"auto found the unfinished run {run_dir}, which was started with another job"
    hint = (
        "set the fields below to their values in that run, or resume that run unchanged: "
        f"{resume_command(run_dir, job)}, or start a new run: --set resume=never, or another name"
    )
    return Problem("resume", rule, hint=hint)


def _resolve(job: Job, run_dir: str) -> Job:
    """Return the job as that run writes it: with its batch size found and its rate scaled."""
    if job.batch_size_search:
        record = read_record(run_dir, "batch_size.json", BatchSizeRecord)
        if record is not None:
            job = apply_batch_size(job, record.batch_size_per_worker)
    return resolve_lr_scaling(keep_worker_count(job, run_dir))


def _value_text(fields: Mapping[str, Any], key: str) -> str:
    return shown(fields[key]) if key in fields else "not set"
