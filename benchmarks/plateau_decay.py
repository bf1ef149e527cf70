"""The paper's reference: the rate divided by 10 when accuracy saturates.

The product's schedules are written down beforehand, and this one is not: so it is torch's
`ReduceLROnPlateau` on the product's learner.
"""

from __future__ import annotations

import math

from in_process import WHOLE, Outcome, Reporter, open_learner
from torch.optim.lr_scheduler import ReduceLROnPlateau

from raytrain_opt.config.learning_rate import SchedulePolicy
from raytrain_opt.config.schema import Job

_FACTOR = 0.1


def train_with_plateau_decay(job: Job, patience: int) -> Outcome:
    """From the job's initial rate; divided by 10 after more than `patience` epochs in a row in
    which accuracy on the selection split was not higher than the highest so far. No warm-up.
    """
    learner, section = open_learner(job), job.learning_rate
    assert isinstance(section, SchedulePolicy)
    steps = learner.info.train_size // job.global_batch_size
    reporter, samples, lr = Reporter(learner), 0, section.initial
    scheduler = ReduceLROnPlateau(learner.optimizer, "max", _FACTOR, patience, threshold=0.0)
    for epoch in range(1, job.epochs + 1):
        totals = learner.train(epoch, 0, (lr,) * steps, WHOLE)
        samples += totals.samples
        if not math.isfinite(totals.loss):
            reporter.give_up(f"epoch {epoch}")
            break
        scheduler.step(learner.evaluate("selection").accuracy)
        lr = learner.optimizer.param_groups[0]["lr"]
        reporter.outcome.notes.append({"epoch": epoch, "next_base_lr": lr})
        reporter.look(samples, epoch)
    learner.close()
    return reporter.finish(samples, section.initial)
