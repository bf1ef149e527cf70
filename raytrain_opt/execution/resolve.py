"""Resolve a job: once, to one frozen value, by which everything that is started lives. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raytrain_opt.config.schema import Job
from raytrain_opt.config.section import is_function_name
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.optim.epoch_steps import EpochSteps, Length, epoch_steps, length_of
from raytrain_opt.optim.schedules import ScalingRule, scale_lr
from raytrain_opt.search.factory import build_policy, guessing_loss
from raytrain_opt.search.optimizer_race import why_without_muon
from raytrain_opt.search.policy import Policy
from raytrain_opt.search.stpt_horizon import TaskFacts
from raytrain_opt.train.learner_config import LearnerConfig

if TYPE_CHECKING:
    from raytrain_opt.data.base import DataInfo


@dataclass(frozen=True)
class Facts:
    """What reading the data of a job and trying its network has shown (`check.try_job`).

    `muon_flops`: operations with which a step of Muon orthogonalizes, if the job may choose it;
    None if Muon cannot train the network. `sample_flops`: operations of training one sample;
    `search_flops`: the same, estimated where torch does not count. `channel_norm`: the network
    normalizes channels; `embeddings`: it has some.
    """

    info: DataInfo
    muon_flops: float | None = 0.0
    sample_flops: float = 0.0
    search_flops: float = math.inf
    channel_norm: bool = True
    embeddings: bool = False


@dataclass(frozen=True)
class Placement:
    """The processes that a job gets.

    `threads`: compute threads of each worker on CPU, None for an even part of the node's cores.
    """

    workers: int
    threads: int | None

    @classmethod
    def from_job(cls, job: Job) -> Placement:
        """Return what the job asks for, with one worker if the cluster is to decide."""
        return cls(job.workers.size, job.workers.threads)


@dataclass(frozen=True)
class Resolved:
    """A job with all that follows from it, its data and the processes that it gets.

    `job`: as job.yaml has it, with final batch size, rate, workers and threads. `learner`: with
    the optimizers that are worth trying. `policy`: chooses the rates. `steps`: updates per epoch.
    `note`: why an optimizer was left out.
    """

    job: Job
    info: DataInfo
    learner: LearnerConfig
    length: Length
    steps: EpochSteps
    policy: Policy
    note: str | None = None


def resolve(job: Job, facts: Facts, placement: Placement, global_batch_size: int) -> Resolved:
    """Resolve a job. Raises JobError if the batch, or a replayed schedule, does not fit its data.

    `global_batch_size`: the one that was searched, or the job's own.
    """
    job = settle(job, placement, global_batch_size)
    learner, length = LearnerConfig.from_job(job), length_of(job)
    steps = count_updates(learner, facts.info)
    note, chosen = None, job
    if job.optimizer.chooses_freely:
        batch_flops = facts.sample_flops * global_batch_size
        note = why_without_muon(facts.muon_flops, batch_flops, length.total_steps(steps))
        optimizer = job.optimizer.usual(
            channel_norm=facts.channel_norm, embeddings=facts.embeddings, muon=note is None
        )
        chosen = job.model_copy(update={"optimizer": optimizer})
    task = TaskFacts(
        channel_norm=facts.channel_norm,
        validation_size=facts.info.validation_size,
        step_flops=facts.search_flops * global_batch_size,
        guessing_loss=guessing_loss(job, facts.info.num_classes, facts.info.class_counts),
        classifies=job.task.is_classification,
        own_order=is_function_name(job.data.sampler),
        initial_lr=job.initial_lr,
    )
    policy = build_policy(chosen, length, steps, task)
    learner = replace(learner, optimizers=chosen.optimizers, data_digest=facts.info.digest)
    return Resolved(job, facts.info, learner, length, steps, policy, note)


def settle(job: Job, placement: Placement, global_batch_size: int) -> Job:
    """Return the job with this batch and the rate for it, and what it leaves open of workers."""
    changes: dict[str, object] = {}
    if job.batch_size_search is not None:
        changes |= {"global_batch_size": global_batch_size, "batch_size_search": None}
    policy = job.learning_rate
    if job.batch_size_search is not None or policy.scaling is not None:
        lr = scaled_lr(job, global_batch_size)
        changes["learning_rate"] = policy.model_copy(update={"initial": lr, "scaling": None})
    changes["workers"] = job.workers.settled(placement.workers, placement.threads)
    return job.model_copy(update=changes)


def scaled_lr(job: Job, global_batch_size: int) -> float:
    """Return the initial rate for a batch."""
    rule, reference = scaling_of(job)
    return scale_lr(rule, job.initial_lr, reference, global_batch_size)


def scaling_of(job: Job) -> tuple[ScalingRule, int]:
    """Return the rule, of `learning_rate.scaling` or the search, and the batch of `initial`."""
    scaling, search = job.learning_rate.scaling, job.batch_size_search
    if scaling is not None:
        return scaling.rule, scaling.reference_batch_size
    return "none" if search is None else search.lr_rule, job.global_batch_size


def count_updates(learner: LearnerConfig, info: DataInfo) -> EpochSteps:
    """Count the updates of each epoch. Raises JobError if the batch does not fit the data."""
    batch, ramp = learner.global_batch_size, learner.batch_ramp
    drop_last = learner.data.drop_last
    for factor in () if drop_last else (1, *(step.factor for step in ramp)):
        parts = learner.micro_batches * factor
        remainder = info.train_size % (batch * factor)
        if 0 < remainder < 2 * parts:  # BatchNorm and DDP need two
            rule = (
                f"the last update of an epoch would split {remainder} samples into {parts} "
                "micro-batches, and each needs two; write true, or change global_batch_size"
            )
            raise JobError([Problem("data.drop_last", rule, "false")])
    return epoch_steps(info.train_size, batch, ramp, drop_last=drop_last)
