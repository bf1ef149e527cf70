"""Policies without candidates: fixed schedules, drops on plateaus, replay of a recorded run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from raytrain_opt.config.learning_rate import SchedulePolicy
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.optim.epoch_steps import EpochSteps
from raytrain_opt.optim.schedules import Schedule, build_schedule
from raytrain_opt.search.policy import History, Policy, TrainEpoch


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
        return TrainEpoch(epoch, lrs, "schedule")


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
        return TrainEpoch(epoch, tuple(schedule.lr(total * f) for f in fractions), "schedule")


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
        lrs = tuple(lr * self.gamma**drops for lr in action.lrs)
        return replace(action, lrs=lrs, reason=f"schedule after {drops} plateaus")


@dataclass(frozen=True)
class RecordedSchedule(Policy):
    """Replay a schedule.jsonl."""

    lrs: tuple[tuple[float, ...], ...]  # by epoch and step
    weight_decay_factors: tuple[float, ...]  # by epoch
    full_steps: tuple[int, ...]  # of each epoch, had it trained on all samples
    held_out: tuple[int, ...]  # samples by epoch
    restarts: tuple[bool, ...]  # by epoch
    lr_multipliers: Mapping[str, float] = field(default_factory=dict)  # other than 1
    optimizer: str = "SGD"
    auto_weight_decay: bool = False

    @classmethod
    def parse(cls, text: str, source: str) -> RecordedSchedule:
        """Parse a schedule.jsonl read from `source`. Raises JobError if it is none of a run."""
        try:
            epochs = [json.loads(line) for line in text.split("\n")[:-1]]
            return cls(
                tuple(tuple(float(lr) for lr in epoch["lrs"]) for epoch in epochs),
                tuple(float(epoch["weight_decay_factor"]) for epoch in epochs),
                tuple(int(epoch["full_steps"]) for epoch in epochs),
                tuple(int(epoch["held_out"]) for epoch in epochs),
                tuple(bool(epoch["restarts"]) for epoch in epochs),
                {k: float(f) for k, f in epochs[-1]["lr_multipliers"].items()},
                str(epochs[-1]["optimizer"]),
                bool(epochs[-1]["auto_weight_decay"]),
            )
        except (
            ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
        ) as error:  # fmt: skip
            rule = f"{source} is not a schedule.jsonl of a run ({error!r})"
            raise JobError([Problem("learning_rate.schedule", rule)]) from error

    def policy(self, epochs: int, steps: EpochSteps) -> RecordedSchedule:
        """Return itself as a job's policy. Raises JobError if the steps per epoch differ."""
        if list(self.full_steps) != [steps(epoch) for epoch in range(1, epochs + 1)]:
            rule = (
                f"the schedule is for {len(self.lrs)} epochs of {_span(self.full_steps)} steps, "
                f"this job has {epochs} of {steps.first}; use "
                "the same data, global_batch_size, batch_ramp and epochs (and, for a run of "
                "policy stpt, data.validation_fraction: 0.1, its default)"
            )
            raise JobError([Problem("learning_rate.schedule", rule)])
        return self

    def next(self, epoch: int, history: History) -> TrainEpoch:
        i = epoch - 1
        return TrainEpoch(
            epoch,
            self.lrs[i],
            "replay",
            self.weight_decay_factors[i],
            held_out=self.held_out[i],
            restarts=self.restarts[i],
        )

    def may_restart(self, epoch: int, history: History) -> bool:
        return self.restarts[epoch : epoch + 1] == (True,)


def _span(steps: Sequence[int]) -> str:
    low, high = min(steps, default=0), max(steps, default=0)
    return str(low) if low == high else f"{low} to {high}"
