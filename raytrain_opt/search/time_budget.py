"""Lay out a training in the time that is left: how much of it the next epoch covers.

    t, c, e  seconds of an update, of an evaluation, and of all else in an epoch
    S, k     updates in a full epoch; every k-th epoch and the last are evaluated
    T        seconds left, less what the last evaluation adds: e (1 - 1/k)
    E        seconds of a full epoch: S t + c + e/k

While more than two full epochs fit into T, the next one is full. From then on an epoch takes half
of what is left, so that the speed is measured again and again before the end: the last ones are
short, but not shorter than `shortest_s` and 4 (c + e/k).

An epoch covers the same fraction of what is left of the schedule as of the updates left. So the
rate is continuous when the speed changes, and the schedule ends with the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from raytrain_opt.optim.epoch_steps import EpochSpan


@dataclass(frozen=True)
class Pace:
    """Measured seconds of an update, of an evaluation, and of all else in an epoch."""

    step_s: float
    evaluate_s: float
    other_s: float = 0.0

    def updated(self, measured: Pace) -> Pace:
        """Return the mean of this pace and that of the last epoch: each alone is noisy."""
        pairs = zip(astuple(self), astuple(measured), strict=True)
        return Pace(*((before + now) / 2 for before, now in pairs))


def plan_epoch(
    epoch: int,
    left_s: float,
    pace: Pace,
    full_steps: int,
    *,
    evaluate_every: int = 1,
    shortest_s: float = 0.0,
    plans: Sequence[EpochSpan] = (),
) -> EpochSpan:
    """Return what `epoch` covers of a training that has to end in `left_s` seconds.

    `full_steps`: updates of a full epoch. `plans`: earlier ones; the last of each epoch before
    says what it covered. At least one update is left to train.
    """
    left = _lay_out(left_s, pace, full_steps, evaluate_every, shortest_s)
    done = {plan.epoch: plan for plan in plans if plan.epoch < epoch}
    start = done[epoch - 1].stop if done else 0.0
    stop = 1.0 if len(left) == 1 else start + (1.0 - start) * left[0] / sum(left)
    total_steps = sum(plan.steps for plan in done.values()) + sum(left)
    epochs = epoch - 1 + len(left)
    return EpochSpan(epoch, epochs, start, stop, 1.0, left[0], total_steps)


def _lay_out(
    left_s: float, pace: Pace, full_steps: int, evaluate_every: int, shortest_s: float
) -> list[int]:
    """Return the updates of each epoch that is left."""
    other_s = pace.other_s + pace.evaluate_s / evaluate_every
    left_s -= pace.evaluate_s * (1 - 1 / evaluate_every)
    full_s = full_steps * pace.step_s + other_s
    shortest_s = max(shortest_s, 4 * other_s, pace.step_s)
    full_epochs = max(0, int(left_s / full_s) - 1)
    left_s -= full_epochs * full_s
    epochs = [full_steps] * full_epochs
    while left_s > 0:
        epoch_s = max(left_s / 2, shortest_s)
        if left_s - epoch_s < shortest_s:
            epoch_s = left_s
        epoch_s = min(epoch_s, full_s)
        epochs.append(round((epoch_s - other_s) / pace.step_s))
        left_s -= epoch_s
    return [steps for steps in epochs if steps > 0] or [1]
