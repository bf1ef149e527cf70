"""Build the learning-rate policy of a job."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from raytrain_opt.config.learning_rate import (
    HorizonPolicy,
    ReplayPolicy,
    SchedulePolicy,
    StptPolicy,
)
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.optim.epoch_steps import EpochSteps
from raytrain_opt.optim.schedules import build_schedule
from raytrain_opt.search.fixed_schedule import (
    FixedSchedule,
    PlannedSchedule,
    PlateauSchedule,
    RecordedSchedule,
)
from raytrain_opt.search.optimizer_race import guessing_loss
from raytrain_opt.search.peak_search import MAX_CANDIDATES
from raytrain_opt.search.policy import Policy
from raytrain_opt.search.stpt import Stpt
from raytrain_opt.search.stpt_horizon import HorizonStpt
from raytrain_opt.storage import read_file

# Longer than any epoch (so that alpha never exceeds it), and exact as a float.
_ENDLESS_STEPS = 2**53


def build_policy(
    job: Job,
    steps: EpochSteps,
    *,
    channel_norm: bool = True,
    validation_size: int = 0,
    step_flops: float = math.inf,
    class_counts: Sequence[int] = (),
) -> Policy:
    """Build the job's policy. Raises JobError if it does not match the steps per epoch.

    `channel_norm`: the network normalizes channels; `validation_size`: samples of the validation
    split; `step_flops`: operations of an update; see `HorizonStpt`. `class_counts`: samples of
    each class.
    """
    section = job.learning_rate
    if isinstance(section, HorizonPolicy):
        return HorizonStpt(
            section,
            job.epochs,
            steps,
            job.optimizers,
            channel_norm,
            validation_size,
            step_flops,
            _guessing_loss(job, class_counts),
        )
    if isinstance(section, SchedulePolicy):
        policy: FixedSchedule | PlannedSchedule = PlannedSchedule(section, steps)
        if job.epochs is not None:
            fixed = build_schedule(section, epochs=job.epochs, steps_per_epoch=steps.first)
            policy = FixedSchedule(fixed, steps)
        if section.shape == "plateau":
            return PlateauSchedule(policy, section.gamma, section.patience)
        return policy
    assert job.epochs is not None  # the schema refuses the others
    if isinstance(section, StptPolicy):
        return Stpt(section, job.epochs, steps)
    return _replay(section, job, job.epochs, steps)


def _replay(section: ReplayPolicy, job: Job, epochs: int, steps: EpochSteps) -> RecordedSchedule:
    """Read the schedule that a job replays. Raises JobError if it belongs to another one."""
    schedule = read_schedule(section.schedule)
    recorded = schedule.epochs[-1]
    if recorded.optimizer != job.optimizer.name:
        rule = f"the replayed schedule belongs to {recorded.optimizer}"
        raise JobError([Problem("optimizer", rule, str(job.optimizer.name))])
    if recorded.auto_weight_decay != job.optimizer.has_auto_weight_decay:
        kind = "auto" if recorded.auto_weight_decay else "a number, or not given,"
        rule = f"was {kind} in the run that is replayed; write the same"
        weight_decay = str(job.optimizer.args.get("weight_decay", "nothing"))
        raise JobError([Problem("optimizer.args.weight_decay", rule, weight_decay)])
    multipliers = job.optimizer.group_lr_multipliers
    if recorded.lr_multipliers != multipliers:
        rule = f"the replayed schedule belongs to {dict(recorded.lr_multipliers)}"
        raise JobError([Problem("optimizer.lr_multipliers", rule, str(multipliers))])
    schedule.check(epochs, steps)
    return schedule


def _guessing_loss(job: Job, class_counts: Sequence[int]) -> float:
    """Return the loss of a guess by the classes' frequencies; infinite for other losses."""
    loss = job.loss
    if not job.task.is_classification or loss.name != "cross_entropy" or loss.class_weights:
        return math.inf
    return guessing_loss(class_counts, loss.label_smoothing)


def read_schedule(path: str) -> RecordedSchedule:
    """Read the schedule.jsonl of an earlier run. Raises JobError if that is impossible."""
    try:
        text = read_file(Path(path).expanduser()).decode()
    except (OSError, ValueError) as error:
        problem = Problem("learning_rate.schedule", f"cannot be read: {error}", repr(path))
        raise JobError([problem]) from error
    return RecordedSchedule.parse(text, path)


def max_candidates(job: Job) -> int:
    """Return the largest number of candidates of any round of the job; 0 without rounds."""
    section = job.learning_rate
    if isinstance(section, HorizonPolicy):
        return MAX_CANDIDATES
    if not isinstance(section, StptPolicy) or job.epochs is None:
        return 0
    stpt = Stpt(section, job.epochs, EpochSteps(_ENDLESS_STEPS))
    rounds = range(stpt.warmup.epochs + 1, job.epochs + 1)
    count = max((len(stpt.multipliers(epoch)) for epoch in rounds), default=0)
    return count if count > 1 else 0  # a single candidate is no search
