"""Rules over several sections of a job: settings that are valid alone, but not together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from raytrain_opt.config.data import BatchAugment, DatasetData
from raytrain_opt.config.section import BrokenRule

if TYPE_CHECKING:
    from raytrain_opt.config.schema import Job

_NEEDS_COUNT = "belongs to a given number of workers; set workers.count"


def needs_validation(job: Job) -> bool:
    """Return whether the job decides by the validation split."""
    section = job.learning_rate
    follows = getattr(section, "plateau_on", "") == "val_metric"
    return follows or section.policy in ("stpt", "stpt_horizon")


def broken_rules(job: Job) -> Iterator[BrokenRule]:
    """Yield every rule over several sections that the job breaks."""
    if job.epochs is None and job.train_for is None:
        yield "epochs", "is required, or train_for in its place"
    if job.train_for is not None:
        yield from _time_rules(job)
    yield from _task_rules(job)
    yield from _batch_rules(job)
    yield from _rate_rules(job)
    yield from _ramp_rules(job)
    yield from _device_rules(job)
    if job.parallel.mode == "async":
        yield from _async_rules(job)
    yield from _micro_batch_rules(job)


def _time_rules(job: Job) -> Iterator[BrokenRule]:
    """Yield what counts epochs of a training whose number of epochs follows from its speed."""
    if job.epochs is not None:
        yield "train_for", "is given in place of epochs; remove one of the two"
    policy = job.learning_rate
    shape = getattr(policy, "shape", None)
    if shape not in ("constant", "linear", "polynomial", "cosine"):
        yield (
            "train_for",
            f"policy {policy.policy}{f' of shape {shape}' if shape else ''} needs a number of "
            "epochs; use policy stpt_horizon, or schedule of shape constant, linear, "
            "polynomial or cosine",
        )
    if job.batch_ramp.steps:
        yield "batch_ramp.steps", "needs a number of epochs, and the job gives train_for"
    if job.parallel.mode == "async":
        yield "train_for", "needs workers in step; parallel.mode is async"


def _task_rules(job: Job) -> Iterator[BrokenRule]:
    """Yield what only classification has: a task of the user's own does without."""
    is_balanced = job.data.sampler == "balanced"
    if job.task.is_classification:
        if is_balanced and job.loss.class_weights == "balanced":
            yield "loss.class_weights", "data.sampler: balanced does the same; remove one"
        return
    if is_balanced:
        yield "data.sampler", "balanced needs the labels of task: classification"
    if job.loss != type(job.loss)():
        yield "loss", "belongs to task: classification; a task of your own returns its loss"
    augment, is_own = job.data.augment, isinstance(job.data, DatasetData)
    rule = "a task of your own gets the samples as they are; change your Dataset"
    if augment is not None and (augment.mixup or augment.cutmix):
        yield "data.augment", "mixup and cutmix need the labels of task: classification"
    elif is_own and augment != BatchAugment():
        yield "data.augment", rule
    if is_own and job.data.normalize != "auto":
        yield "data.normalize", rule


def _batch_rules(job: Job) -> Iterator[BrokenRule]:
    if job.global_batch_size % job.workers.size:
        rule = f"does not split evenly over {job.workers.size} workers; give a multiple of that"
        yield "global_batch_size", rule
    if job.batch_norm.sync and job.workers.min_workers < job.workers.size:
        yield (
            "workers.count",
            "with fewer workers the micro-batches per worker can differ, and batch_norm.sync "
            "needs all workers in each; leave one of the two out",
        )
    if job.batch_size_search is not None and job.learning_rate.policy == "replay":
        yield "batch_size_search", "a replayed schedule belongs to the batch size of its run"
    if job.batch_size_search is not None and not job.data.drop_last:
        rule = "must be true with find-batch-size or batch_size_search"
        yield "data.drop_last", rule


def _rate_rules(job: Job) -> Iterator[BrokenRule]:
    warmup = job.learning_rate.warmup
    if warmup is not None and job.epochs is not None and warmup.epochs > job.epochs:
        yield "learning_rate.warmup.epochs", f"is more than the {job.epochs} epochs of the job"
    if needs_validation(job) and job.data.validation_fraction == 0:
        rule = f"policy {job.learning_rate.policy} decides by the validation split; set it above 0"
        yield "data.validation_fraction", rule
    if job.learning_rate.search_on == "workers" and job.search_on == "slots":
        rule = "candidate_batch: local and parallel.mode: async need slots"
        yield "learning_rate.search_on", rule
    yield from _optimizer_rules(job)


def _optimizer_rules(job: Job) -> Iterator[BrokenRule]:
    policy = job.learning_rate.policy
    is_constant = getattr(job.learning_rate, "shape", "") == "constant"
    can_be_constant = is_constant or policy in ("replay", "stpt_horizon")
    if job.optimizer.name == "auto" and policy != "stpt_horizon":
        yield "optimizer", f"auto is chosen by policy stpt_horizon; with {policy}, name one"
        return
    if job.optimizer.is_schedule_free and job.average is not None:
        yield "average", f"{job.optimizer.name} averages its weights itself; remove it"
    has_fixed_rates = policy in ("schedule", "replay") and job.parallel.mode != "async"
    if job.optimizer.momentum_warmup is not None and not has_fixed_rates:
        yield "optimizer.momentum_warmup", "needs policy schedule or replay, and not async"
    for optimizer in job.optimizers:
        if optimizer.is_schedule_free and not can_be_constant:
            yield (
                "learning_rate",
                f"{optimizer.name} needs a constant rate after the warm-up; write "
                "{policy: stpt_horizon}, or {policy: schedule, shape: constant, initial: …, "
                "warmup: {epochs: 1}} (customary rates: ScheduleFreeSGD 1, ScheduleFreeAdamW "
                "0.0025)",
            )
        if optimizer.has_auto_weight_decay and policy not in ("stpt_horizon", "replay"):
            rule = "auto is chosen by policy stpt_horizon; else give a number"
            yield "optimizer.args.weight_decay", rule


def _ramp_rules(job: Job) -> Iterator[BrokenRule]:
    ramp, warmup = job.batch_ramp.steps, job.learning_rate.warmup
    if any(b.epoch <= a.epoch or b.factor <= a.factor for a, b in pairwise(ramp)):
        yield "batch_ramp.steps", "epochs and factors must increase from one entry to the next"
    last = max((step.epoch for step in ramp), default=0)
    if job.epochs is not None and last > job.epochs:
        yield "batch_ramp.steps", f"epoch {last} is after the last epoch, {job.epochs}"
    if ramp and warmup is not None and ramp[0].epoch <= warmup.epochs:
        rule = f"starts in epoch {ramp[0].epoch}, within the warm-up of {warmup.epochs} epochs"
        yield "batch_ramp.steps", rule


def _device_rules(job: Job) -> Iterator[BrokenRule]:
    for pool, section in (("workers", job.workers), ("slots", job.slots)):
        gpus = (section.resources or {}).get("GPU", 0)
        if gpus > 1 and gpus != int(gpus):
            yield f"{pool}.resources.GPU", "must be an integer above 1"
    if job.batch_norm.sync and job.workers.use_gpu is False and job.workers.size > 1:
        yield "batch_norm.sync", "torch's SyncBatchNorm needs GPUs, and workers.use_gpu is false"


def _micro_batch_rules(job: Job) -> Iterator[BrokenRule]:
    """Yield why the micro-batches do not share a global batch."""
    count, workers, batch = job.parallel.micro_batches, job.workers.size, job.global_batch_size
    if count is None:
        return
    needs_equal = job.parallel.mode == "async" or job.batch_norm.sync
    if batch % count or count < workers or (needs_equal and count % workers):
        least = "a multiple of" if needs_equal else "at least"
        rule = f"must be {least} workers.count ({workers}) and divide global_batch_size ({batch})"
        yield "parallel.micro_batches", rule
    if job.workers.count == "auto" and needs_equal:
        yield "parallel.micro_batches", _NEEDS_COUNT
    if job.batch_size_search is not None:
        rule = "belongs to one global_batch_size: not with find-batch-size or batch_size_search"
        yield "parallel.micro_batches", rule


def _async_rules(job: Job) -> Iterator[BrokenRule]:
    """Yield what needs workers that take a step together, which asynchronous ones never do."""
    if job.batch_norm.sync:
        yield "batch_norm.sync", "needs all workers in every step, and parallel.mode is async"
    if not job.data.drop_last:
        yield "data.drop_last", "workers of parallel.mode: async need equal micro-batches"
    if job.batch_norm.recalibrate_batches:
        rule = "remove it: with async the running statistics are pooled after every epoch"
        yield "batch_norm.recalibrate_batches", rule
    if job.optimizer.name == "auto":
        yield "optimizer", "auto needs parallel.mode: sync; name one optimizer"
    if job.average is not None or job.optimizer.is_schedule_free:
        path = "optimizer.name" if job.average is None else "average"
        yield path, "averages weights that all workers share; needs parallel.mode: sync"
    if job.optimizer.name == "RMSpropWarmup":
        yield "optimizer.name", "counts updates, of which a step has several with async"
    if job.optimizer.clip_norm is not None:
        rule = "with async no gradient of a global batch exists; remove it, or use mode: sync"
        yield "optimizer.clip_norm", rule
    if job.precision == "fp16":
        rule = "fp16 scales the loss by overflows that asynchronous workers do not share; use bf16"
        yield "precision", rule
    if job.workers.min_workers < job.workers.size:
        rule = "has no minimum with async: workers continue without a worker that died"
        yield "workers.count", rule
