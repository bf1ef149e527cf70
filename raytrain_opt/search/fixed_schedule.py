"""Policies without candidates: a fixed schedule, and the replay of a recorded one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from raytrain_opt.errors import JobError, Problem
from raytrain_opt.optim.epoch_steps import EpochSteps
from raytrain_opt.optim.schedules import Schedule
from raytrain_opt.search.policy import History, NoCandidates, TrainEpoch

# More than any training has: a damaged file must not fill the memory.
_MAX_STEPS = 10**9


@dataclass(frozen=True)
class FixedSchedule(NoCandidates):
    """Train each epoch at the rates of a schedule.

    The schedule counts steps as if all epochs had the number of steps of the first. An epoch with
    fewer, larger batches covers the same part of the schedule in larger strides.
    """

    schedule: Schedule
    steps: EpochSteps

    def next(self, epoch: int, history: History) -> TrainEpoch:
        """Return the epoch with the schedule's rates."""
        first, steps = (epoch - 1) * self.steps.first, self.steps(epoch)
        lrs = tuple(
            self.schedule.lr(first + step * self.steps.first / steps) for step in range(steps)
        )
        return TrainEpoch(epoch, lrs, "schedule")


@dataclass(frozen=True)
class RecordedSchedule:
    """The contents of schedule.json: each step's rate, each epoch's factor of the weight decay.

    `lr_multipliers`: factors of the rate, by the parameters that have one other than 1.
    `optimizer`: its name.
    """

    epoch_steps: tuple[int, ...]
    lrs: tuple[float, ...]
    weight_decay_factors: tuple[float, ...] = ()
    lr_multipliers: Mapping[str, float] = field(default_factory=dict)
    optimizer: str = "SGD"

    def to_json(self) -> dict[str, object]:
        """Return the JSON object: equal rates in a row make one segment, which keeps it small."""
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
            "optimizer": self.optimizer,
            "weight_decay_factors": list(self.weight_decay_factors),
            "lr_multipliers": dict(self.lr_multipliers),
            "segments": segments,
        }

    @classmethod
    def from_json(cls, value: object, source: str) -> RecordedSchedule:
        """Parse a schedule.json read from `source`. Raises JobError if it is none of a run."""
        try:
            if not isinstance(value, dict):
                raise TypeError("not a JSON object")
            segments = [(float(item["lr"]), int(item["steps"])) for item in value["segments"]]
            factors = tuple(float(factor) for factor in value.get("weight_decay_factors", ()))
            multipliers = {k: float(f) for k, f in value.get("lr_multipliers", {}).items()}
            epoch_steps = tuple(int(steps) for steps in value["epoch_steps"])
            schedule = cls(
                epoch_steps, (), factors, multipliers, str(value.get("optimizer", "SGD"))
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            rule = f"{source} is not a schedule.json of a run ({error!r})"
            raise JobError([Problem("learning_rate.schedule", rule)]) from error
        if factors and len(factors) != len(epoch_steps):
            rule = f"{source}: {len(factors)} weight_decay_factors for {len(epoch_steps)} epochs"
            raise JobError([Problem("learning_rate.schedule", rule)])
        steps = sum(count for _, count in segments)
        if steps > _MAX_STEPS or any(count < 1 for _, count in segments):
            rule = f"{source} has {steps} steps; each segment needs at least 1, all at most 10^9"
            raise JobError([Problem("learning_rate.schedule", rule)])
        if steps != sum(schedule.epoch_steps):
            rule = (
                f"{source}: its segments have {steps} steps, "
                f"its epochs {sum(schedule.epoch_steps)}"
            )
            raise JobError([Problem("learning_rate.schedule", rule)])
        return replace(schedule, lrs=tuple(lr for lr, count in segments for _ in range(count)))

    def policy(self, epochs: int, steps: EpochSteps) -> Replay:
        """Return the policy that replays it. Raises JobError if the steps per epoch differ."""
        if self.epoch_steps != tuple(steps(epoch) for epoch in range(1, epochs + 1)):
            rule = (
                f"the schedule is for {len(self.epoch_steps)} epochs of "
                f"{_span(self.epoch_steps)} steps, this job has {epochs} of {steps.first}; use "
                "the same data, global_batch_size, batch_ramp and epochs (and, for a run of "
                "policy stpt, data.validation_fraction: 0.1, its default)"
            )
            raise JobError([Problem("learning_rate.schedule", rule)])
        return Replay(self, steps)


@dataclass(frozen=True)
class Replay(NoCandidates):
    """Train each step at the rate recorded by an earlier run."""

    recorded: RecordedSchedule
    steps: EpochSteps

    def next(self, epoch: int, history: History) -> TrainEpoch:
        """Return the epoch with its recorded rates."""
        first = self.steps.before(epoch)
        lrs = self.recorded.lrs[first : first + self.steps(epoch)]
        factors = self.recorded.weight_decay_factors
        return TrainEpoch(epoch, lrs, "replay", factors[epoch - 1] if factors else 1.0)


def _span(steps: Sequence[int]) -> str:
    low, high = min(steps, default=0), max(steps, default=0)
    return str(low) if low == high else f"{low} to {high}"
