"""A global batch that grows at given epochs, and the number of updates in each epoch.

Where a schedule would divide the learning rate by a factor, multiplying the batch by it lowers the
noise of the gradients as much, in fewer updates.
Source: Smith, Kindermans, Ying and Le, Don't Decay the Learning Rate, Increase the Batch Size,
ICLR 2018.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from raytrain_opt.config.schema import Job
from raytrain_opt.config.updates import RampStep
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.results import Steps


def ramp_factor(ramp: Sequence[RampStep], epoch: int) -> int:
    """Return the factor by which the global batch of `epoch` (from 1) exceeds the job's."""
    return max((step.factor for step in ramp if step.epoch <= epoch), default=1)


@dataclass(frozen=True)
class EpochSpan:
    """The part of a training that `epoch` covers, in `steps` updates: from `start` to `stop`."""

    epoch: int
    epochs: int  # of the training, as estimated
    start: float
    stop: float
    total: float  # the end of the training in the same unit
    steps: int
    total_steps: int  # of the training, as estimated

    @property
    def is_last(self) -> bool:
        """Whether the training ends with this epoch."""
        return self.stop == self.total


@dataclass(frozen=True)
class EpochSteps:
    """Updates in each epoch: `first` from epoch 1 on, and (epoch, updates) pairs from there on."""

    first: int
    later: tuple[tuple[int, int], ...] = ()

    def __call__(self, epoch: int) -> int:
        """Return the number of updates in `epoch` (from 1)."""
        return [self.first, *(steps for start, steps in self.later if start <= epoch)][-1]

    def last(self, epoch: int, lrs: tuple[float, ...]) -> Steps:
        """Return the last steps of `epoch`, one at each of these rates."""
        return Steps(self(epoch) - len(lrs), lrs)

    def before(self, epoch: int) -> int:
        """Return the number of updates in all epochs before `epoch`."""
        starts = [1, *(start for start, _ in self.later if start < epoch), epoch]
        spans = zip(starts, starts[1:], strict=False)
        return sum((end - start) * self(start) for start, end in spans)


@dataclass(frozen=True)
class Length:
    """The length of a training: a number of epochs, or wall time with the search."""

    known_epochs: int = 0  # 0 for a time, which `execution.length` estimates
    seconds: float = math.inf

    def __str__(self) -> str:
        return f"{self.known_epochs} epochs" if self.known_epochs else f"{self.seconds:g} s"

    def total_steps(self, steps: EpochSteps) -> float:
        """Return the updates of the training; infinite if they depend on its speed."""
        return steps.before(self.known_epochs + 1) if self.known_epochs else math.inf

    def expected_steps(self, steps: EpochSteps, spans: Sequence[EpochSpan]) -> int:
        """Return the updates of the training without a batch ramp, as estimated at first."""
        return self.known_epochs * steps.first or spans[0].total_steps

    def span(
        self, epoch: int, steps: EpochSteps, spans: Sequence[EpochSpan], start: int = 0
    ) -> EpochSpan:
        """Return the part that `epoch` covers of the training after the first `start` epochs."""
        epochs, done = self.known_epochs, epoch - start
        if not epochs:
            return spans[-1]
        total = steps.before(epochs + 1) - steps.before(start + 1)
        return EpochSpan(epoch, epochs, done - 1, done, epochs - start, steps(epoch), total)


def length_of(job: Job) -> Length:
    """Return the length of a job's training."""
    return Length(job.epochs or 0, math.inf if job.train_for is None else job.train_for)


def epoch_steps(
    train_size: int,
    global_batch_size: int,
    ramp: Sequence[RampStep] = (),
    *,
    drop_last: bool = True,
) -> EpochSteps:
    """Count the updates in each epoch of `train_size` samples. Raises JobError for fewer than one.

    `drop_last`: without the samples that do not fill a global batch.
    """
    factors = {"global_batch_size": 1}
    factors |= {f"batch_ramp.{i}.factor": step.factor for i, step in enumerate(ramp)}
    for path, factor in factors.items():
        if (size := global_batch_size * factor) > train_size:
            rule = f"larger than the training set, which has {train_size} samples to train on"
            raise JobError([Problem(path, rule, f"a global batch of {size}")])

    def count(size: int) -> int:
        return train_size // size if drop_last else -(-train_size // size)

    later = tuple((step.epoch, count(global_batch_size * step.factor)) for step in ramp)
    return EpochSteps(count(global_batch_size), later)
