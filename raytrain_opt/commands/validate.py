"""Check a job as a run does before it starts, and name its most important choices."""

from __future__ import annotations

from raytrain_opt.config.schema import Job
from raytrain_opt.config.section import function_name
from raytrain_opt.errors import JobError, printable
from raytrain_opt.execution.check import check_job, try_local_job
from raytrain_opt.optim.epoch_steps import length_of


def validate(job: Job, job_file: str) -> str:
    """Check a job and its data, without any download; return its choices, defaults included.

    Raises JobError that names `job_file`, DataError.
    """
    if problems := check_job(job):
        raise JobError(problems, job_file)
    facts = try_local_job(job, job_file)
    summary, notes = {"data": ""}, ["data not checked: the data set is not downloaded yet"]
    if facts is not None:
        summary, notes = facts.info.summary, [*facts.info.notes]
    searched = job.batch_size_search
    split = ", divided among the free GPUs"
    if job.workers.is_given:
        split = f" = {job.workers.size} workers x {job.batch_size_per_worker}"
    lines = {
        "model": function_name(job.model.name),
        **summary,
        "data": ", ".join(filter(None, (function_name(job.data.name), summary["data"]))),
        "learning rate": job.learning_rate.summary,
        "optimizer": " or ".join(str(optimizer.name) for optimizer in job.optimizers),
        "training": f"{length_of(job)}, precision {job.precision}, seed {job.seed}",
        "global batch": f"{job.global_batch_size}{split}"
        + (f", before the search by {searched.strategy}" if searched else ""),
        "results": job.storage_path,
    }
    shown = [f"{name:14} {text}" for name, text in lines.items()]
    texts = (printable(text, kept="") for text in (*shown, *notes))
    return "\n  ".join((f"{job_file}: valid", *texts))
