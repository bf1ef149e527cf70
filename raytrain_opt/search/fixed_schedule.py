"""Policies without candidates: fixed schedules, drops on plateaus, replay of a recorded run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pydantic import BaseModel, Field, ValidationError

from raytrain_opt.config.learning_rate import SchedulePolicy
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.optim.epoch_steps import EpochSteps
from raytrain_opt.optim.schedules import Schedule, build_schedule
from raytrain_opt.results import Steps
from raytrain_opt.search.policy import History, Policy, StartAgain, TrainEpoch


@dataclass(frozen=True)
class FixedSchedule(Policy):
    """Train at the rates of a schedule; an epoch of fewer steps covers it in larger strides."""

    schedule: Schedule
    steps: EpochSteps

    def next(self, epoch: int, history: History) -> TrainEpoch:
        first, steps = (epoch - 1) * self.steps.first, self.steps(epoch)
        lrs = tuple(
            self.schedule.lr(first + step * self.steps.first / steps) for step in range(steps)
        )
        return TrainEpoch(epoch, Steps(0, lrs), "schedule")


@dataclass(frozen=True)
class PlannedSchedule(Policy):
    """Train at the rates of a schedule whose length the plans of the history change."""

    section: SchedulePolicy
    steps: EpochSteps

    def next(self, epoch: int, history: History) -> TrainEpoch:
        total, per_epoch = history.plans[0].total_steps, self.steps.first
        warmup_epochs = self.section.warmup.epochs
        if warmup_epochs * per_epoch > total:
            rule = f"is more than the {total / per_epoch:.3g} epochs for which train_for is enough"
            raise JobError([Problem("learning_rate.warmup.epochs", rule, str(warmup_epochs))])
        schedule = build_schedule(
            self.section, epochs=total / per_epoch, steps_per_epoch=per_epoch
        )
        fractions = history.plans[-1].fractions(offset=0.0)
        lrs = tuple(schedule.lr(total * fraction) for fraction in fractions)
        return TrainEpoch(epoch, self.steps.last(epoch, lrs), "schedule")


@dataclass(frozen=True)
class PlateauSchedule(Policy):
    """Multiply the rates of a schedule by `gamma` each time the losses have stopped falling.

    That is after more than `patience` epochs in a row without a new lowest one, as torch's
    ReduceLROnPlateau does with a threshold of 0.
    """

    schedule: FixedSchedule | PlannedSchedule
    gamma: float
    patience: int

    def next(self, epoch: int, history: History) -> TrainEpoch:
        drops, waited, lowest = 0, 0, math.inf
        for loss in history.epoch_losses:
            waited = 0 if loss < lowest else waited + 1
            lowest = min(lowest, loss)
            if waited > self.patience:
                drops, waited = drops + 1, 0
        action = self.schedule.next(epoch, history)
        lrs = tuple(lr * self.gamma**drops for lr in action.steps.lrs)
        steps = replace(action.steps, lrs=lrs)
        return replace(action, steps=steps, reason=f"schedule after {drops} plateaus")


class RecordedEpoch(BaseModel):
    """What schedule.jsonl holds of an epoch."""

    epoch: int = Field(description="Epoch, from 1.")
    optimizer: str = Field(description="Name of the optimizer.")
    auto_weight_decay: bool = Field(description="Whether the run had `weight_decay: auto`.")
    restarts: bool = Field(description="Whether the epoch began from the initial weights.")
    lr_multipliers: dict[str, float] = Field(
        description=(
            "Factors other than 1 on the learning rate, by patterns of parameter names; `aux`: of "
            "the parameters that follow Muon's second rule."
        )
    )
    steps: Steps = Field(
        description=(
            "All steps of the epoch. With `train_for` the last epochs are shorter: they train the "
            "last steps of an epoch."
        )
    )


@dataclass(frozen=True)
class RecordedSchedule(Policy):
    """Replay a schedule.jsonl."""

    epochs: tuple[RecordedEpoch, ...]

    @classmethod
    def parse(cls, text: str, source: str) -> RecordedSchedule:
        """Parse a schedule.jsonl read from `source`. Raises JobError if it is none of a run."""
        lines = text.split("\n")[:-1]
        rule = f"{source} is not a schedule.jsonl of a run"
        if not lines:
            raise JobError([Problem("learning_rate.schedule", rule)])
        try:
            return cls(tuple(map(RecordedEpoch.model_validate_json, lines)))
        except ValidationError as error:
            rule += f" ({error.errors(include_url=False)[0]['msg']})"
            raise JobError([Problem("learning_rate.schedule", rule)]) from error

    def check(self, epochs: int, steps: EpochSteps) -> None:
        """Raise JobError if a job of this length has other steps per epoch."""
        recorded = [epoch.steps.end for epoch in self.epochs]
        if recorded != [steps(epoch) for epoch in range(1, epochs + 1)]:
            low, high = min(recorded), max(recorded)
            shown = str(low) if low == high else f"{low} to {high}"
            rule = (
                f"the schedule is for {len(recorded)} epochs of {shown} steps, "
                f"this job has {epochs} of {steps.first}; use "
                "the same data, global_batch_size, batch_ramp and epochs (and, for a run of "
                "policy stpt, data.validation_fraction: 0.1, its default)"
            )
            raise JobError([Problem("learning_rate.schedule", rule)])

    @property
    def last_restart(self) -> int:
        return max((i for i, epoch in enumerate(self.epochs, 1) if epoch.restarts), default=0)

    def next(self, epoch: int, history: History) -> StartAgain | TrainEpoch:
        recorded = self.epochs[epoch - 1]
        if recorded.restarts and epoch not in history.restarts:
            return StartAgain(epoch, "replay")
        steps = replace(recorded.steps, optimizer=0)  # a replay names the optimizer
        return TrainEpoch(epoch, steps, "replay")
