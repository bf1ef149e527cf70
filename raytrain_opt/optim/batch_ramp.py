"""A global batch that grows at given epochs, and the number of updates that each epoch then has.

Source: Smith et al., ICLR 2018: where a schedule would lower the learning rate by a factor, a
batch larger by that factor lowers the noise of the gradients as much, in fewer updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytrain_opt.config.optimizer import RampStep
from raytrain_opt.errors import JobError, Problem


def ramp_factor(ramp: Sequence[RampStep], epoch: int) -> int:
    """By how much the global batch of `epoch` (from 1) is larger than the job's."""
    return max((step.factor for step in ramp if step.epoch <= epoch), default=1)


@dataclass(frozen=True)
class EpochSteps:
    """Updates in each epoch: `first` at the start, other numbers from the epochs of `later` on."""

    first: int
    later: tuple[tuple[int, int], ...] = ()

    def __call__(self, epoch: int) -> int:
        """Updates in `epoch` (from 1)."""
        return [self.first, *(steps for start, steps in self.later if start <= epoch)][-1]

    def before(self, epoch: int) -> int:
        """Updates in all epochs before `epoch`."""
        starts = [1, *(start for start, _ in self.later if start < epoch), epoch]
        spans = zip(starts, starts[1:], strict=False)
        return sum((end - start) * self(start) for start, end in spans)


def epoch_steps(
    train_size: int, global_batch_size: int, ramp: Sequence[RampStep] = ()
) -> EpochSteps:
    """Whole global batches in each epoch of `train_size` samples. Raises JobError where an epoch
    has none.
    """
    sizes = {step.epoch: global_batch_size * step.factor for step in ramp}
    where = {f"batch_ramp.{i}.factor": sizes[step.epoch] for i, step in enumerate(ramp)}
    for path, size in {"global_batch_size": global_batch_size, **where}.items():
        if size > train_size:
            rule = (
                f"larger than the training set, which has {train_size} samples without the "
                "selection split"
            )
            raise JobError([Problem(path, rule, f"a global batch of {size}")])
    later = tuple((epoch, train_size // size) for epoch, size in sizes.items())
    return EpochSteps(train_size // global_batch_size, later)
