"""Policies without candidates: a written-down schedule, and the replay of a found one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raytrain_opt.errors import JobError, Problem
from raytrain_opt.optim.schedules import Schedule
from raytrain_opt.search.policy import NoCandidates, Plan, Round

# More than any training has; a damaged file must not fill the memory.
_MOST_STEPS = 10**9


@dataclass(frozen=True)
class FixedSchedule(NoCandidates):
    """Train each epoch at the schedule's rates."""

    schedule: Schedule
    steps_per_epoch: int

    def plan(self, epoch: int, history: Sequence[Round]) -> Plan:
        """The epoch's rates, read off the schedule."""
        first = (epoch - 1) * self.steps_per_epoch
        lrs = tuple(self.schedule.lr(first + step) for step in range(self.steps_per_epoch))
        return Plan(epoch, lrs[0], "schedule", lrs=lrs)


@dataclass(frozen=True)
class FoundSchedule:
    """The rates of a whole training, one a step: what a run leaves as schedule.json."""

    steps_per_epoch: int
    lrs: tuple[float, ...]

    def to_json(self) -> dict[str, object]:
        """Runs of equal rates, so that a long training stays a small file."""
        segments: list[dict[str, float]] = []
        for lr in self.lrs:
            if segments and segments[-1]["lr"] == lr:
                segments[-1]["steps"] += 1
            else:
                segments.append({"steps": 1, "lr": lr})
        return {
            "schema_version": 1,
            "steps_per_epoch": self.steps_per_epoch,
            "steps": len(self.lrs),
            "segments": segments,
        }

    @classmethod
    def from_json(cls, value: object, source: str) -> FoundSchedule:
        """Raises JobError when it is not a schedule.json of a run."""
        try:
            if not isinstance(value, dict):
                raise TypeError("not a JSON object")
            segments = [(float(at["lr"]), int(at["steps"])) for at in value["segments"]]
            found = cls(int(value["steps_per_epoch"]), ())
        except (KeyError, TypeError, ValueError) as error:
            rule = f"{source} is not a schedule.json of a run ({error!r})"
            raise JobError([Problem("learning_rate.schedule", rule)]) from error
        steps = sum(count for _, count in segments)
        if steps > _MOST_STEPS or any(count < 1 for _, count in segments):
            rule = f"{source} has {steps} steps; each segment has at least one, all at most 10^9"
            raise JobError([Problem("learning_rate.schedule", rule)])
        return replace(found, lrs=tuple(lr for lr, count in segments for _ in range(count)))

    def policy(self, epochs: int, steps_per_epoch: int) -> FixedSchedule:
        """Replay it. Raises JobError unless the trainings have the same length."""
        if (self.steps_per_epoch, len(self.lrs)) != (steps_per_epoch, epochs * steps_per_epoch):
            found = len(self.lrs) // max(self.steps_per_epoch, 1)
            rule = (
                f"the schedule is for {found} epochs of {self.steps_per_epoch} steps, this job "
                f"has {epochs} of {steps_per_epoch}; use the same data, selection_fraction, "
                "global_batch_size and epochs"
            )
            raise JobError([Problem("learning_rate.schedule", rule)])
        return FixedSchedule(_Written(self.lrs), steps_per_epoch)


@dataclass(frozen=True)
class _Written:
    lrs: tuple[float, ...]

    def lr(self, step: int) -> float:
        return self.lrs[step]
