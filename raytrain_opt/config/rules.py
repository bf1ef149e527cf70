"""Rules over several sections of a job: settings that are valid alone, but not together.

What a mode, a policy, an optimizer or a kind of data can do, its section says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from raytrain_opt.config.data import BatchAugment
from raytrain_opt.config.section import BrokenRule

if TYPE_CHECKING:
    from raytrain_opt.config.schema import Job

# The path of a setting; whether a job has it (in `_RULES` without what it needs); what is wrong, a
# format of `job`.
Rule = tuple[str, Callable[["Job"], Any], str]

# Settings that need workers that take each step together.
_NEED_COMMON_STEPS: dict[str, Callable[[Job], Any]] = {
    "train_for": lambda job: job.train_for,
    "data.drop_last": lambda job: not job.data.drop_last,
    "optimizer": lambda job: job.optimizer.is_choice,
    "optimizer.name": lambda job: (
        job.optimizer.is_schedule_free or job.optimizer.traits.counts_updates
    ),
    "optimizer.momentum_warmup": lambda job: job.optimizer.momentum_warmup,
    "optimizer.clip_norm": lambda job: job.optimizer.clip_norm,
    "average": lambda job: job.average,
    "batch_norm.recalibrate_batches": lambda job: job.batch_norm.recalibrate_batches,
    "precision": lambda job: job.precision == "fp16",  # overflows change the scale of all
    "workers.count": lambda job: job.workers.can_shrink,
}

_OWN_SAMPLES = "a task of your own gets the samples as they are; change your Dataset"

_RULES: tuple[Rule, ...] = (
    (
        "epochs",
        lambda job: job.epochs is None and job.train_for is None,
        "is required, or train_for in its place",
    ),
    (
        "train_for",
        lambda job: job.epochs and job.train_for,
        "is given in place of epochs; remove one of the two",
    ),
    (
        "train_for",
        lambda job: job.train_for and not job.learning_rate.fits_any_length,
        "needs policy stpt_horizon, or schedule of shape constant, linear, polynomial or cosine",
    ),
    (
        "batch_ramp.steps",
        lambda job: job.train_for and job.batch_ramp.steps,
        "needs a number of epochs, and the job gives train_for",
    ),
    (
        "loss.class_weights",
        lambda job: job.data.is_balanced and job.loss.class_weights == "balanced",
        "data.sampler: balanced does the same; remove one",
    ),
    (
        "data.sampler",
        lambda job: job.data.is_balanced and not job.task.is_classification,
        "balanced needs the labels of task: classification",
    ),
    (
        "loss",
        lambda job: job.loss != type(job.loss)() and not job.task.is_classification,
        "belongs to task: classification; a task of your own returns its loss",
    ),
    (
        "data.augment",
        lambda job: job.data.augment.mixes and not job.task.is_classification,
        "mixup and cutmix need the labels of task: classification",
    ),
    (
        "data.augment",
        lambda job: job.gives_own_samples and job.data.augment != BatchAugment(),
        _OWN_SAMPLES,
    ),
    (
        "data.normalize",
        lambda job: job.gives_own_samples and job.data.normalize != "auto",
        _OWN_SAMPLES,
    ),
    (
        "batch_size_search",
        lambda job: job.batch_size_search and job.learning_rate.recorded,
        "a replayed schedule belongs to the batch size of its run",
    ),
    (
        "data.drop_last",
        lambda job: job.batch_size_search and not job.data.drop_last,
        "must be true with find-batch-size or batch_size_search",
    ),
    (
        "parallel.micro_batches",
        lambda job: job.batch_size_search and job.parallel.micro_batches,
        "belongs to one global_batch_size: not with find-batch-size or batch_size_search",
    ),
    (
        "parallel.micro_batches",
        lambda job: (
            job.parallel.micro_batches
            and not job.workers.is_given
            and not job.parallel.common_steps
        ),
        "belongs to a given number of workers; set workers.count",
    ),
    (
        "data.validation_fraction",
        lambda job: job.learning_rate.needs_validation and job.data.validation_fraction == 0,
        "policy {job.learning_rate.policy} decides by the validation split; set it above 0",
    ),
    (
        "learning_rate.search_on",
        lambda job: job.learning_rate.search_on == "workers" and job.search_on == "slots",
        "candidate_batch: local and parallel.mode: async need slots",
    ),
    (
        "optimizer",
        lambda job: job.optimizer.is_choice and not job.learning_rate.searches_first,
        "auto is chosen by policy stpt_horizon; with {job.learning_rate.policy}, name one",
    ),
    (
        "optimizer.momentum_warmup",
        lambda job: job.optimizer.momentum_warmup and job.learning_rate.has_candidates,
        "needs policy schedule or replay",
    ),
    (
        "optimizer.args.weight_decay",
        lambda job: job.optimizer.has_auto_weight_decay and not job.learning_rate.is_found,
        "auto is chosen by policy stpt_horizon; else give a number",
    ),
    (
        "average",
        lambda job: job.average and job.optimizer.is_schedule_free,
        "{job.optimizer.name} averages its weights itself; remove it",
    ),
    (
        "learning_rate",
        lambda job: job.optimizer.is_schedule_free and not job.learning_rate.can_be_constant,
        "{job.optimizer.name} needs a constant rate after the warm-up; write {{policy: "
        "stpt_horizon}}, or {{policy: schedule, shape: constant, initial: …, warmup: {{epochs: "
        "1}}}} (customary rates: ScheduleFreeSGD 1, ScheduleFreeAdamW 0.0025)",
    ),
)


def broken_rules(job: Job) -> Iterator[BrokenRule]:
    """Yield every rule over several sections that the job breaks."""
    for path, is_used in () if job.parallel.common_steps else _NEED_COMMON_STEPS.items():
        if is_used(job):
            yield path, "needs workers that take each step together, as parallel.mode: sync has"
    for path, is_broken, text in _RULES:
        if is_broken(job):
            yield path, text.format(job=job)
    yield from _batch_rules(job)
    yield from _epoch_rules(job)


def _batch_rules(job: Job) -> Iterator[BrokenRule]:
    """Yield why micro-batches, by default one per worker, do not share a global batch."""
    batch, workers = job.global_batch_size, job.workers.size
    count = job.parallel.micro_batches
    if count is None:
        if batch % workers:
            rule = f"does not split evenly over {workers} workers; give a multiple of that"
            yield "global_batch_size", rule
        return
    needs_equal = not job.parallel.common_steps
    if batch % count or count < workers or (needs_equal and count % workers):
        least = "a multiple of" if needs_equal else "at least"
        rule = f"must be {least} workers.count ({workers}) and divide global_batch_size ({batch})"
        yield "parallel.micro_batches", rule


def _epoch_rules(job: Job) -> Iterator[BrokenRule]:
    """Yield which epochs of a warm-up or of a batch ramp the training does not have."""
    warmup, ramp = job.learning_rate.warmup, job.batch_ramp.steps
    warmup_epochs = 0 if warmup is None else warmup.epochs
    if job.epochs is not None and warmup_epochs > job.epochs:
        yield "learning_rate.warmup.epochs", f"is more than the {job.epochs} epochs of the job"
    if any(b.epoch <= a.epoch or b.factor <= a.factor for a, b in pairwise(ramp)):
        yield "batch_ramp.steps", "epochs and factors must increase from one entry to the next"
    last = max((step.epoch for step in ramp), default=0)
    if job.epochs is not None and last > job.epochs:
        yield "batch_ramp.steps", f"epoch {last} is after the last epoch, {job.epochs}"
    if ramp and ramp[0].epoch <= warmup_epochs:
        rule = f"starts in epoch {ramp[0].epoch}, within the warm-up of {warmup_epochs} epochs"
        yield "batch_ramp.steps", rule
