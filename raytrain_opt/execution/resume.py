"""Which run a job may resume: `resume: auto` finds the unfinished one, others are named.

The job is compared here with the one that the run began with; `training_run` restores the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any

from raytrain_opt import storage
from raytrain_opt.config.error_messages import shown
from raytrain_opt.config.load import flatten, parse_job, plain_job, refuse_functions
from raytrain_opt.config.schema import Job
from raytrain_opt.config.section import is_instance
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.execution.resolve import Placement, settle
from raytrain_opt.paths import check_run, newest_unfinished
from raytrain_opt.recording.reader import read_lines, read_raw_lines, read_record, read_text
from raytrain_opt.recording.records import BatchSizeRecord, EpochRecord

_ABSENT = object()
# They change when a run gives up, what it keeps and where it runs, not what it computes. Data at
# another place are compared with those of the latest checkpoint when they are read.
_HARMLESS = (
    "checkpoint.", "max_restarts", "timeouts.", "workers.resources", "data.root", "data.cache",
)  # fmt: skip
# A run that is named may also become longer or shorter.
_LENGTH = ("epochs", "train_for", "stop")


def load_run_job(run_dir: str, overrides: Sequence[str], *, trust: bool) -> Job:
    """Load the job of a run that is resumed; under a URI, nothing else is fetched for that.

    Without `trust`, a job that names functions is refused before one of them is imported.
    """
    check_run(run_dir)
    job = _read_job(run_dir, overrides)
    refuse_functions([(f, n) for f, n in job.functions if not trust or is_instance(n)], run_dir)
    return job


def find_run(job: Job, resume: str | None) -> tuple[Job, str | None]:
    """Return the job, and the run directory that it continues; None for a new run.

    Workers and threads that the job leaves open are as many as that run has. Raises JobError if
    the run, `resume` or the one that `resume: auto` finds, was started with another job.
    """
    if resume is not None:
        check_run(resume)
    is_auto = resume is None and job.resume == "auto"
    run_dir = newest_unfinished(job.storage_path, job.name) if is_auto else resume
    if run_dir is None:
        return job, None
    unfinished = _read_job(run_dir)
    workers = job.workers.settled(unfinished.workers.count, unfinished.workers.threads)
    job = job.model_copy(update={"workers": workers})
    has_new_length = check_continues(job, _settled_fields(unfinished, run_dir), run_dir)
    if resume is not None and not has_new_length and _is_finished(run_dir):
        hint = f"with more epochs: {resume_command(run_dir, job, '--set epochs=N')}"
        rule = f"has finished; see {storage.join(run_dir, 'report.html')}"
        raise JobError([Problem("--resume", rule, repr(run_dir), hint)], "arguments")
    return job, run_dir


def job_fields(job: Job) -> dict[str, Any]:
    """Return every value of a job by its path, as a checkpoint keeps them."""
    return flatten(plain_job(job))


def check_continues(
    job: Job, trained: Mapping[str, Any], run_dir: str, *, is_edited: bool = False
) -> bool:
    """Raise JobError unless the job continues a run with these fields; another length is allowed.

    `is_edited`: the run's own job.yaml was, since it had them. Returns whether it has another
    length.
    """
    problems = _differences(job, trained, run_dir)
    if changes := [problem for problem in problems if not problem.path.startswith(_LENGTH)]:
        allowed = ", ".join(name.rstrip(".") for name in (*_LENGTH, *_HARMLESS))
        path, rule = "resume", f"continues {run_dir}, in which only {allowed} can change"
        hint = f"put the values back; {_new_run(job, run_dir)}"
        if is_edited:
            path, rule = "job.yaml", f"of {run_dir} was edited since the latest checkpoint, while "
            rule, hint = f"{rule}only {allowed} can change", "put the values back"
        raise JobError([Problem(path, rule, hint=hint), *changes])
    if problems:
        _check_length(job, trained, run_dir)
    return bool(problems)


def _is_finished(run_dir: str) -> bool:
    return storage.read(run_dir, "result.json") is not None


def _has_trained_for_its_time(run_dir: str) -> bool:
    """Return whether a run has finished, and its `stop` section did not end it earlier."""
    records = read_lines(run_dir, EpochRecord)
    return _is_finished(run_dir) and len(records) == records[-1].epochs


def _check_length(job: Job, trained: Mapping[str, Any], run_dir: str) -> None:
    """Refuse a length that the run cannot have any more after its epochs."""
    epochs, field, rule = len(read_raw_lines(run_dir, EpochRecord)), "epochs", ""
    if not epochs:
        rule = f"cannot change before epoch 1 of {run_dir} is complete: its search belongs to it"
    elif job.epochs is not None and job.epochs <= epochs:
        rule = f"must be more than the {epochs} epochs that {run_dir} has trained"
    elif job.train_for is not None and (
        trained.get("train_for") is None or _has_trained_for_its_time(run_dir)
    ):
        field = "train_for"
        rule = f"plans no more epochs of {run_dir}; give --set train_for=null --set epochs=N"
    if rule:
        hint = _new_run(job, run_dir)
        if epochs:
            hint += f", from its weights with --set model.weights={quote(run_dir)}"
        raise JobError([Problem(field, rule, _value_text(vars(job), field), hint)])


def _new_run(job: Job, run_dir: str) -> str:
    if job.resume != "auto":
        return "or start a new run"
    unchanged = resume_command(run_dir, job)
    return f"or resume that run unchanged: {unchanged}; or start a new run: --set resume=never"


def resume_command(run_dir: str, job: Job, options: str = "") -> str:
    """Return the command, with further `options`, or the call that resumes the run of the job."""
    own = [function for _, function in job.functions]
    if any(is_instance(f) or getattr(f, "__module__", f) == "__main__" for f in own):
        in_process = ", in_process=True" if options == "--in-process" else ""
        return f"run(job, resume={run_dir!r}{in_process}) in the script that made the job"
    # Quoted for a shell: options of a URI contain &.
    words = ["raytrain-opt run --resume", quote(run_dir), "--trust" if job.functions else ""]
    return " ".join(filter(None, [*words, options]))


def _read_job(run_dir: str, overrides: Sequence[str] = ()) -> Job:
    text, source = read_text(run_dir, "job.yaml"), storage.join(run_dir, "job.yaml")
    if text is None:
        raise JobError([Problem("the file", "does not exist")], source)
    return parse_job(text, source, overrides)


def _differences(job: Job, then: Mapping[str, Any], run_dir: str) -> list[Problem]:
    """Return the fields whose values change what a run computes."""
    now = _settled_fields(job, run_dir)
    return [
        Problem(key, f"is {_value_text(then, key)} in that run", _value_text(now, key))
        for key in {**now, **then}
        if now.get(key, _ABSENT) != then.get(key, _ABSENT)
        and not key.startswith((*_HARMLESS, "storage_path", "resume"))
    ]


def _settled_fields(job: Job, run_dir: str) -> dict[str, Any]:
    """Return the fields of the job as that run writes it: with the batch size that it found."""
    batch_size = job.global_batch_size
    if job.batch_size_search is not None and (record := read_record(run_dir, BatchSizeRecord)):
        batch_size = record.batch_size_per_worker * job.workers.size
    return job_fields(settle(job, Placement.from_job(job), batch_size))


def _value_text(fields: Mapping[str, Any], key: str) -> str:
    return shown(fields[key]) if key in fields else "not set"
