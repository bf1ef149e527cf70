"""Rules over several sections of a job: settings that are valid alone, but not together.

What a mode, a policy, an optimizer or a kind of data can do, its section says.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from raytrain_opt.config.data import BatchAugment
from raytrain_opt.config.section import BrokenRule

if TYPE_CHECKING:
    from raytrain_opt.config.schema import Job


def broken_rules(job: Job) -> Iterator[BrokenRule]:
    """Yield every rule over several sections that the job breaks."""
    if not job.parallel.common_steps:
        for path in _needing_common_steps(job):
            yield path, "needs workers that take each step together, as parallel.mode: sync has"
    yield from _length_rules(job)
    yield from _data_rules(job)
    yield from _method_rules(job)
    yield from _batch_rules(job)


def _needing_common_steps(job: Job) -> list[str]:
    """Return the settings of a job that need workers that take each step together."""
    optimizer = job.optimizer
    settings = {
        "train_for": job.train_for,
        "data.drop_last": not job.data.drop_last,
        "optimizer": optimizer.is_choice,
        "optimizer.name": optimizer.is_schedule_free or optimizer.traits.counts_updates,
        "optimizer.clip_norm": optimizer.clip_norm,
        "average": job.average is not None,
        "batch_norm.recalibrate_batches": job.batch_norm.recalibrate_batches,
        "precision": job.precision == "fp16",  # overflows change the scale of all
        "workers.count": job.workers.min_workers < job.workers.size,
    }
    return [path for path, is_used in settings.items() if is_used]


def _length_rules(job: Job) -> Iterator[BrokenRule]:
    """Yield what does not fit the length, and epochs that the training does not have."""
    section, ramp, epochs = job.learning_rate, job.batch_ramp, job.epochs
    if epochs is None and job.train_for is None:
        yield "epochs", "is required, or train_for in its place"
    if epochs and job.train_for:
        yield "train_for", "is given in place of epochs; remove one of the two"
    fits_any_length = not section.is_recorded and (section.decays or section.can_be_constant)
    if job.train_for and not fits_any_length:
        shapes = "schedule of shape constant, linear, polynomial or cosine"
        yield "train_for", f"needs policy stpt_horizon, or {shapes}"
    if job.train_for and ramp:
        yield "batch_ramp", "needs a number of epochs, and the job gives train_for"
    warmup_epochs = 0 if section.warmup is None else section.warmup.epochs
    if epochs is not None and warmup_epochs > epochs:
        yield "learning_rate.warmup.epochs", f"is more than the {epochs} epochs of the job"
    if any(b.epoch <= a.epoch or b.factor <= a.factor for a, b in pairwise(ramp)):
        yield "batch_ramp", "epochs and factors must increase from one entry to the next"
    last = max((step.epoch for step in ramp), default=0)
    if epochs is not None and last > epochs:
        yield "batch_ramp", f"epoch {last} is after the last epoch, {epochs}"
    if ramp and ramp[0].epoch <= warmup_epochs:
        rule = f"starts in epoch {ramp[0].epoch}, within the warm-up of {warmup_epochs} epochs"
        yield "batch_ramp", rule


def _data_rules(job: Job) -> Iterator[BrokenRule]:
    """Yield what does not fit the data or the task."""
    data = job.data
    if data.is_balanced and job.loss.class_weights == "balanced":
        yield "loss.class_weights", "data.sampler: balanced does the same; remove one"
    if job.task.is_classification and job.stop and (job.stop.target or 0) > 1:
        yield "stop.target", "is above 1, which no accuracy reaches; 93 % is 0.93"
    if not job.task.is_classification:
        if data.is_balanced:
            yield "data.sampler", "balanced needs the labels of task: classification"
        if job.loss != type(job.loss)():
            yield "loss", "belongs to task: classification; a task of your own returns its loss"
        if data.augment.mixup or data.augment.cutmix:
            yield "data.augment", "mixup and cutmix need the labels of task: classification"
    if data.any_samples and not job.task.is_classification:
        rule = "a task of your own gets the samples as they are; change your Dataset"
        if data.augment != BatchAugment():
            yield "data.augment", rule
        if data.normalize != "auto":
            yield "data.normalize", rule
    if job.decides_by_validation and data.validation_fraction == 0:
        rule = f"policy {job.learning_rate.policy} decides by the validation split"
        yield "data.validation_fraction", f"{rule}; set it above 0"


def _method_rules(job: Job) -> Iterator[BrokenRule]:
    """Yield what optimizer, average and policy cannot do together."""
    section, optimizer = job.learning_rate, job.optimizer
    if section.search_on == "workers" and job.search_on == "slots":
        rule = "candidate_batch: local and parallel.mode: async need slots"
        yield "learning_rate.search_on", rule
    if optimizer.is_choice and not section.searches_first:
        rule = f"auto is chosen by policy stpt_horizon; with {section.policy}, name one"
        yield "optimizer", rule
    if optimizer.has_auto_weight_decay and not section.is_found:
        rule = "auto is chosen by policy stpt_horizon; else give a number"
        yield "optimizer.args.weight_decay", rule
    if job.average is not None and optimizer.is_schedule_free:
        yield "average", f"{optimizer.name} averages its weights itself; remove it"
    if optimizer.is_schedule_free and not section.can_be_constant:
        rule = f"{optimizer.name} needs a constant rate after the warm-up; write {{policy: "
        rule += "stpt_horizon}, or {policy: schedule, shape: constant, initial: …, warmup: "
        rule += "{epochs: 1}} (customary rates: ScheduleFreeSGD 1, ScheduleFreeAdamW 0.0025)"
        yield "learning_rate", rule


def _batch_rules(job: Job) -> Iterator[BrokenRule]:
    """Yield what a search would change, and why micro-batches do not share a global batch."""
    batch, workers, count = job.global_batch_size, job.workers.size, job.parallel.micro_batches
    if job.batch_size_search:
        search = "find-batch-size or batch_size_search"
        if job.learning_rate.is_recorded:
            yield "batch_size_search", "a replayed schedule belongs to the batch size of its run"
        if not job.data.drop_last:
            yield "data.drop_last", f"must be true with {search}"
        if count:
            yield "parallel.micro_batches", f"belongs to one global_batch_size: not with {search}"
    if count is None:  # one per worker
        if batch % workers:
            rule = f"does not split evenly over {workers} workers; give a multiple of that"
            yield "global_batch_size", rule
        return
    needs_equal = not job.parallel.common_steps
    if needs_equal and not job.workers.is_given:
        yield "parallel.micro_batches", "belongs to a given number of workers; set workers.count"
    if batch % count or count < workers or (needs_equal and count % workers):
        least = "a multiple of" if needs_equal else "at least"
        rule = f"must be {least} workers.count ({workers}) and divide global_batch_size ({batch})"
        yield "parallel.micro_batches", rule
