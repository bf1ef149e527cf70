"""A schedule of ours in anyone's training loop, as one of torch's schedulers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from raytrain_opt.optim.schedules import Schedule


class ScheduledLR(LRScheduler):
    """Gives every parameter group the schedule's rate; call `step` after each update.

        schedule = Warmup(0.005, 0.1, 500, "linear", Cosine(0.1, 0.0, 9500), origin=500)
        scheduler = ScheduledLR(optimizer, schedule)

    The rate is the schedule's own, whatever the groups had before. A rate that is a tensor is
    filled in place. `state_dict` holds the step and not the schedule, which is given anew; as
    with torch's, the present rate comes back with the optimiser's `state_dict`.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule) -> None:
        self.schedule = schedule
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """The schedule's rate at this step, once for each parameter group."""
        return [self.schedule.lr(self.last_epoch)] * len(self.optimizer.param_groups)

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule stands, without the schedule: it may hold a function of yours."""
        return {key: value for key, value in super().state_dict().items() if key != "schedule"}
