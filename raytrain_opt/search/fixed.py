"""Policies without candidates: a written-down schedule, and the replay of a found one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raytrain_opt.errors import JobError, Problem
from raytrain_opt.optim.batch_ramp import EpochSteps
from raytrain_opt.optim.schedules import Schedule
from raytrain_opt.search.policy import NoCandidates, Plan, Round

# More than any training has; a damaged file must not fill the memory.
_MOST_STEPS = 10**9


@dataclass(frozen=True)
class FixedSchedule(NoCandidates):
    """Train each epoch at the schedule's rates.

    The schedule counts steps as if all epochs had as many as the first: one with fewer, larger
    batches goes through as much of it.
    """

    schedule: Schedule
    steps: EpochSteps

    def plan(self, epoch: int, history: Sequence[Round], losses: Sequence[float] = ()) -> Plan:
        """The epoch's rates, read off the schedule."""
        first, steps = (epoch - 1) * self.steps.first, self.steps(epoch)
        lrs = tuple(
            self.schedule.lr(first + step * self.steps.first / steps) for step in range(steps)
        )
        return Plan(epoch, lrs[0], "schedule", lrs=lrs)


@dataclass(frozen=True)
class FoundSchedule:
    """The rates of a whole training, one a step, and the factor of its weight decay: what a run
    leaves as schedule.json.
    """

    epoch_steps: tuple[int, ...]
    lrs: tuple[float, ...]
    decay: float = 1.0

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
            "epoch_steps": list(self.epoch_steps),
            "steps": len(self.lrs),
            "weight_decay_factor": self.decay,
            "segments": segments,
        }

    @classmethod
    def from_json(cls, value: object, source: str) -> FoundSchedule:
        """Raises JobError when it is not a schedule.json of a run."""
        try:
            if not isinstance(value, dict):
                raise TypeError("not a JSON object")
            segments = [(float(at["lr"]), int(at["steps"])) for at in value["segments"]]
            decay = float(value.get("weight_decay_factor", 1.0))
            found = cls(tuple(int(steps) for steps in value["epoch_steps"]), (), decay)
        except (KeyError, TypeError, ValueError) as error:
            rule = f"{source} is not a schedule.json of a run ({error!r})"
            raise JobError([Problem("learning_rate.schedule", rule)]) from error
        steps = sum(count for _, count in segments)
        if steps > _MOST_STEPS or any(count < 1 for _, count in segments):
            rule = f"{source} has {steps} steps; each segment has at least one, all at most 10^9"
            raise JobError([Problem("learning_rate.schedule", rule)])
        if steps != sum(found.epoch_steps):
            rule = (
                f"{source}: its segments have {steps} steps, its epochs {sum(found.epoch_steps)}"
            )
            raise JobError([Problem("learning_rate.schedule", rule)])
        return replace(found, lrs=tuple(lr for lr, count in segments for _ in range(count)))

    def policy(self, epochs: int, steps: EpochSteps) -> Replay:
        """Replay it. Raises JobError unless the trainings have the same length."""
        if self.epoch_steps != tuple(steps(epoch) for epoch in range(1, epochs + 1)):
            rule = (
                f"the schedule is for {len(self.epoch_steps)} epochs of "
                f"{_span(self.epoch_steps)} steps, this job has {epochs} of {steps.first}; use "
                "the same data, selection_fraction, global_batch_size, batch_ramp and epochs"
            )
            raise JobError([Problem("learning_rate.schedule", rule)])
        return Replay(self, steps)


@dataclass(frozen=True)
class Replay(NoCandidates):
    """Train each step at the rate that an earlier run found."""

    found: FoundSchedule
    steps: EpochSteps

    def plan(self, epoch: int, history: Sequence[Round], losses: Sequence[float] = ()) -> Plan:
        """The epoch's part of the rates."""
        first = self.steps.before(epoch)
        lrs = self.found.lrs[first : first + self.steps(epoch)]
        return Plan(epoch, lrs[0], "replay", lrs=lrs, decay=self.found.decay)


def _span(steps: Sequence[int]) -> str:
    low, high = min(steps, default=0), max(steps, default=0)
    return str(low) if low == high else f"{low} to {high}"
