"""Pure decisions: which learning rate, and later which batch size."""

from __future__ import annotations

import json
from pathlib import Path

from raytrain_opt.config.learning_rate import HorizonPolicy, ReplayPolicy, StptPolicy
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.optim.batch_ramp import EpochSteps
from raytrain_opt.optim.schedules import build_schedule
from raytrain_opt.search.fixed import FixedSchedule, FoundSchedule
from raytrain_opt.search.policy import Policy
from raytrain_opt.search.stpt import Stpt
from raytrain_opt.search.stpt_horizon import HorizonStpt, most_of_a_round

# Longer than any epoch, and exact as a float.
_ENDLESS_STEPS = 2**53


def build_policy(job: Job, steps: EpochSteps) -> Policy:
    """The policy that the job asks for. Raises JobError when it does not fit the data."""
    section = job.learning_rate
    if isinstance(section, StptPolicy):
        return Stpt(section, job.epochs, steps)
    if isinstance(section, HorizonPolicy):
        return HorizonStpt(section, job.epochs, steps)
    if isinstance(section, ReplayPolicy):
        found = read_schedule(section.schedule)
        return found.policy(job.epochs, steps)
    schedule = build_schedule(section, epochs=job.epochs, steps_per_epoch=steps.first)
    return FixedSchedule(schedule, steps)


def read_schedule(path: str) -> FoundSchedule:
    """The schedule.json of an earlier run. Raises JobError when it cannot be read."""
    try:
        value = json.loads(Path(path).expanduser().read_text())
    except (OSError, ValueError) as error:
        problem = Problem("learning_rate.schedule", f"cannot be read: {error}", repr(path))
        raise JobError([problem]) from error
    return FoundSchedule.from_json(value, path)


def most_candidates(job: Job) -> int:
    """The largest number of candidates in any round of the job; 0 when there are no rounds."""
    section = job.learning_rate
    if isinstance(section, HorizonPolicy):
        return most_of_a_round()
    if not isinstance(section, StptPolicy):
        return 0
    stpt = Stpt(section, job.epochs, EpochSteps(_ENDLESS_STEPS))
    rounds = range(stpt.warmup.epochs + 1, job.epochs + 1)
    most = max((len(stpt.multipliers(epoch)) for epoch in rounds), default=0)
    return most if most > 1 else 0
