"""Policies without candidates: fixed schedules, drops on plateaus, replay of a recorded run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import BaseModel, Field

from raytrain_opt.config.learning_rate import SchedulePolicy
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.optim.epoch_steps import EpochSpan, EpochSteps, Length
from raytrain_opt.optim.schedules import lr_at
from raytrain_opt.results import Steps
from raytrain_opt.search.policy import History, Policy, StartAgain, TrainEpoch


@dataclass(frozen=True)
class FixedSchedule(Policy):
    """Train at the rates of a schedule; an epoch of fewer steps covers it in larger strides.

    Shape plateau drops them as torch's ReduceLROnPlateau does with a threshold of 0.
    """

    section: SchedulePolicy
    length: Length
    steps: EpochSteps

    def __post_init__(self) -> None:
        if self.length.known_epochs:  # a warm-up that is too long is refused now
            self._total(())

    def _total(self, spans: Sequence[EpochSpan]) -> int:
        """Return the updates of the schedule. Raises JobError if its warm-up has more."""
        total, warmup = self.length.expected_steps(self.steps, spans), self.section.warmup
        if warmup.length(self.steps.first) > total:
            unit = "epochs" if warmup.steps is None else "steps"
            rule = f"is longer than the training, which has {total} updates"
            given = str(getattr(warmup, unit))
            raise JobError([Problem(f"learning_rate.warmup.{unit}", rule, given)])
        return total

    def next(self, epoch: int, history: History) -> TrainEpoch:
        total, per_epoch = self._total(history.spans), self.steps.first
        span = self.length.span(epoch, self.steps, history.spans)
        scale = total / span.total
        start, stride = span.start * scale, (span.stop - span.start) * scale / span.steps
        factor = self.section.gamma ** self._drops(history.epoch_losses)
        steps = (start + i * stride for i in range(span.steps))
        lrs = (lr_at(self.section, t, steps=total, steps_per_epoch=per_epoch) for t in steps)
        return TrainEpoch(epoch, self.steps.last(epoch, tuple(factor * lr for lr in lrs)))

    def _drops(self, losses: Sequence[float]) -> int:
        drops, waited, lowest = 0, 0, math.inf
        warmup = math.ceil(self.section.warmup.length(self.steps.first) / self.steps.first)
        for loss in losses[warmup:] if self.section.follows_metric else ():
            waited = 0 if loss < lowest else waited + 1
            lowest = min(lowest, loss)
            if waited > self.section.patience:
                drops, waited = drops + 1, 0
        return drops


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

    def check(self, epochs: int, steps: EpochSteps) -> None:
        """Raise JobError if a job of this length has other steps per epoch."""
        recorded = [epoch.steps.end for epoch in self.epochs]
        if recorded != [steps(epoch) for epoch in range(1, epochs + 1)]:
            rule = (
                f"the schedule is for {len(recorded)} epochs of {min(recorded)} to "
                f"{max(recorded)} steps, this job has {epochs} of {steps.first}; use the same "
                "data, validation_fraction, global_batch_size, batch_ramp and epochs"
            )
            raise JobError([Problem("learning_rate.schedule", rule)])

    @property
    def last_restart(self) -> int:
        return max((i for i, epoch in enumerate(self.epochs, 1) if epoch.restarts), default=0)

    def next(self, epoch: int, history: History) -> StartAgain | TrainEpoch:
        recorded = self.epochs[epoch - 1]
        if recorded.restarts and epoch not in history.restarts:
            return StartAgain(epoch, "replay")
        return TrainEpoch(epoch, replace(recorded.steps, optimizer=0))  # which a replay names
