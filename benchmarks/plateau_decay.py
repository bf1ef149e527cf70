"""The paper's reference: the rate is divided by 10 when accuracy saturates.

The product's schedules are fixed before training and this one is not, so it is torch's
`ReduceLROnPlateau` on the product's learner.
"""

from __future__ import annotations

import math

from torch.optim.lr_scheduler import ReduceLROnPlateau

from benchmarks.in_process import WHOLE, Outcome, Reporter, open_learner
from raytrain_opt.config.learning_rate import SchedulePolicy
from raytrain_opt.config.schema import Job

_FACTOR = 0.1


def train_with_plateau_decay(job: Job, patience: int) -> Outcome:
    """Train from the job's initial rate without warm-up, decaying on plateaus.

    The rate is divided by 10 after more than `patience` epochs in a row without a new highest
    accuracy on the validation split.
    """
    learner, section = open_learner(job), job.learning_rate
    assert isinstance(section, SchedulePolicy)
    steps = learner.info.train_size // job.global_batch_size
    reporter, samples, lr = Reporter(learner, job), 0, section.initial
    scheduler = ReduceLROnPlateau(learner.optimizer, "max", _FACTOR, patience, threshold=0.0)
    for epoch in range(1, reporter.epochs + 1):
        totals = learner.train(epoch, 0, (lr,) * steps, WHOLE)
        samples += totals.samples
        if not math.isfinite(totals.loss):
            reporter.give_up(f"epoch {epoch}")
            break
        scheduler.step(learner.evaluate("validation").accuracy)
        lr = learner.optimizer.param_groups[0]["lr"]
        reporter.outcome.notes.append({"epoch": epoch, "next_base_lr": lr})
        reporter.look(samples, epoch)
    learner.close()
    return reporter.finish(samples, section.initial)
