"""A schedule of this package as one of torch's schedulers, for any training loop."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from raytrain_opt.optim.parameter_groups import scaled_lr
from raytrain_opt.optim.schedules import Schedule


class ScheduledLR(LRScheduler):
    """Set the rate of every parameter group by a schedule; call `step` after each update.

        schedule = Warmup(0.005, 0.1, 500, "linear", Cosine(0.1, 0.0, 9500), origin=500)
        scheduler = ScheduledLR(optimizer, schedule)

    The rates that the groups had before are ignored. A rate that is a tensor is filled in place.
    `state_dict` holds the step but not the schedule: construct the scheduler with it again. As
    with torch's schedulers, the current rate is restored by the optimizer's `state_dict`.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule) -> None:
        self.schedule = schedule
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of each parameter group at this step; see `parameter_groups`."""
        lr = self.schedule.lr(self.last_epoch)
        return [scaled_lr(group, lr) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the schedule, which may hold a function that torch rejects."""
        return {key: value for key, value in super().state_dict().items() if key != "schedule"}
