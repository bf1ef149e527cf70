"""Policies without candidates: a written-down schedule, and the replay of a found one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytrain_opt.errors import JobError, Problem
from raytrain_opt.optim.schedules import Schedule
from raytrain_opt.search.policy import NoCandidates, Plan, Round


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
            assert isinstance(value, dict)
            lrs = [
                float(segment["lr"])
                for segment in value["segments"]
                for _ in range(int(segment["steps"]))
            ]
            return cls(int(value["steps_per_epoch"]), tuple(lrs))
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            rule = f"{source} is not a schedule.json of a run ({error!r})"
            raise JobError([Problem("learning_rate.schedule", rule)]) from error

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
