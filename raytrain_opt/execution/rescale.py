"""Adapt a job to the batch size and the workers that it gets. Pure: a job in, a job out."""

from __future__ import annotations

from raytrain_opt.config.learning_rate import (
    HorizonPolicy,
    ReplayPolicy,
    SchedulePolicy,
    StptPolicy,
)
from raytrain_opt.config.schema import Job
from raytrain_opt.optim.scaling import scale_lr


def apply_batch_size(job: Job, batch_size_per_worker: int) -> Job:
    """Return the job with this batch size, its learning rate rescaled, and no further search.

    The rule is `learning_rate.scaling` where the job has it, else `batch_size_search.lr_rule`.
    """
    search, policy = job.batch_size_search, scalable_policy(job)
    global_batch_size = batch_size_per_worker * job.workers.size
    resized = job.model_copy(
        update={"global_batch_size": global_batch_size, "batch_size_search": None}
    )
    if policy.scaling is not None:
        return resolve_lr_scaling(resized)
    rule = "none" if search is None else search.lr_rule
    lr = scale_lr(rule, policy.initial, job.global_batch_size, global_batch_size)
    return _with_initial_lr(resized, lr)


def resolve_lr_scaling(job: Job) -> Job:
    """Return the job with `learning_rate.scaling` applied to its rate and then removed."""
    scaling = job.learning_rate.scaling
    if scaling is None:
        return job
    lr = scalable_policy(job).initial
    scaled = scale_lr(scaling.rule, lr, scaling.reference_batch_size, job.global_batch_size)
    return _with_initial_lr(job, scaled)


def set_workers(job: Job, **values: object) -> Job:
    """Return the job with these values in its section `workers`."""
    return job.model_copy(update={"workers": job.workers.model_copy(update=values)})


def scalable_policy(job: Job) -> StptPolicy | HorizonPolicy | SchedulePolicy:
    """Return the policy of a job that has a rate; a replayed schedule has none."""
    policy = job.learning_rate
    assert not isinstance(policy, ReplayPolicy)  # the schema refuses a search with replay
    return policy


def _with_initial_lr(job: Job, lr: float) -> Job:
    policy = scalable_policy(job).model_copy(update={"initial": lr, "scaling": None})
    return job.model_copy(update={"learning_rate": policy})
