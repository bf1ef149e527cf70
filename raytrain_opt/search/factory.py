"""Build the learning-rate policy and the batch-size strategy of a job."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from raytrain_opt.config.batch_size import (
    BatchSizeSection,
    EpochTimeMinimizeSearch,
    GpuUsageMaximizeSearch,
    ThroughputKneeSearch,
)
from raytrain_opt.config.learning_rate import (
    HorizonPolicy,
    ReplayPolicy,
    SchedulePolicy,
    StptPolicy,
)
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.optim.epoch_steps import EpochSteps, Length
from raytrain_opt.search.batch_size.published import EpochTimeMinimize, GpuUsageMaximize
from raytrain_opt.search.batch_size.strategy import SizeBounds, Strategy
from raytrain_opt.search.batch_size.throughput_knee import ThroughputKnee
from raytrain_opt.search.fixed_schedule import FixedSchedule, RecordedEpoch, RecordedSchedule
from raytrain_opt.search.optimizer_race import class_entropy
from raytrain_opt.search.policy import Policy
from raytrain_opt.search.stpt import Stpt
from raytrain_opt.search.stpt_horizon import NO_FACTS, HorizonStpt, TaskFacts
from raytrain_opt.storage import read_file


def build_policy(
    job: Job, length: Length, steps: EpochSteps, facts: TaskFacts = NO_FACTS
) -> Policy:
    """Build the job's policy. Raises JobError if it does not match the steps per epoch."""
    match job.learning_rate:
        case HorizonPolicy() as section:
            return HorizonStpt(section, length, steps, job.optimizers, facts)
        case StptPolicy() as section:
            return Stpt(section, length.known_epochs, steps)
        case SchedulePolicy() as section:
            return FixedSchedule(section, length, steps)
        case ReplayPolicy() as section:
            return _replay(job, section, length, steps)


def _replay(
    job: Job, section: ReplayPolicy, length: Length, steps: EpochSteps
) -> RecordedSchedule:
    """Read the schedule that a job replays. Raises JobError if it belongs to another one."""
    schedule, own = read_schedule(section.schedule), job.optimizer
    recorded = schedule.epochs[-1]
    given = str(own.name), own.has_auto_weight_decay, own.group_lr_multipliers
    if given != (recorded.optimizer, recorded.auto_weight_decay, recorded.lr_multipliers):
        decay = "auto" if recorded.auto_weight_decay else "a number, or nothing"
        factors = f"lr_multipliers {recorded.lr_multipliers or 'left out'}"
        rule = f"was {recorded.optimizer} with weight_decay: {decay} and {factors}"
        rule += " in the run that is replayed; write the same"
        raise JobError([Problem("optimizer", rule)])
    schedule.check(length.known_epochs, steps)
    return schedule


def read_schedule(path: str) -> RecordedSchedule:
    """Read the schedule.jsonl of an earlier run. Raises JobError if that is impossible."""
    try:
        lines = read_file(Path(path).expanduser()).decode().split("\n")[:-1]
        if epochs := tuple(map(RecordedEpoch.model_validate_json, lines)):
            return RecordedSchedule(epochs)
        rule = "is not a schedule.jsonl of a run"
    except ValidationError:
        rule = "is not a schedule.jsonl of a run"
    except (OSError, ValueError) as error:
        rule = f"cannot be read: {error}"
    raise JobError([Problem("learning_rate.schedule", rule, repr(path))])


def guessing_loss(job: Job, num_classes: int, class_counts: Sequence[int]) -> float:
    """Return the loss of a guess by the classes' frequencies; infinite for other losses.

    Where the frequencies in an epoch are not known, all classes count alike.
    """
    loss = job.loss
    if not (job.task.is_classification and loss.is_cross_entropy) or loss.class_weights:
        return math.inf
    known = class_counts and job.data.sampler == "random"
    counts = class_counts if known else (1,) * num_classes
    return class_entropy(counts, loss.label_smoothing)


def build_strategy(section: BatchSizeSection, bounds: SizeBounds) -> Strategy:
    """Build the strategy that the section names, with its settings."""
    match section:
        case ThroughputKneeSearch():
            return ThroughputKnee(section, bounds)
        case GpuUsageMaximizeSearch():
            return GpuUsageMaximize(section, bounds)
        case EpochTimeMinimizeSearch():
            return EpochTimeMinimize(section, bounds)
