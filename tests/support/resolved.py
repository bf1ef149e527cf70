"""A job as it is resolved where no cluster decides anything."""

from __future__ import annotations

from raytrain_opt import Job
from raytrain_opt.execution.check import try_job
from raytrain_opt.execution.resolve import Placement, Resolved, resolve


def resolve_here(job: Job) -> Resolved:
    """Read the data of a job and resolve it with the workers that it asks for."""
    facts, *_ = try_job(job)
    return resolve(job, facts, Placement.from_job(job), job.global_batch_size)
