"""Schedule-free SGD and Lightning's lr_find, on the product's learner."""

from __future__ import annotations

import logging
import math
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import count

import numpy as np
import torch
from in_process import WHOLE, Outcome, Point, Reporter, open_learner, train_in_process
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.learning_rate import SchedulePolicy
from raytrain_opt.config.schema import Job
from raytrain_opt.train.learner import Learner

# Training batches that schedule-free's averaged weights have their BatchNorm statistics from.
_NORM_BATCHES = 10


def train_schedulefree(job: Job) -> Outcome:
    """schedulefree.SGDScheduleFree in place of momentum SGD, at the job's constant rate, with
    its own warm-up of the job's length.

    It is evaluated at its averaged weights, for which it asks for fresh BatchNorm statistics:
    those of some training batches, without gradients; no samples are counted for that.
    """
    from schedulefree import SGDScheduleFree

    learner, section = open_learner(job), _section(job)
    steps = learner.info.train_size // job.global_batch_size
    optimizer = SGDScheduleFree(
        learner.model.parameters(),
        lr=section.initial,
        weight_decay=float(job.optimizer.args["weight_decay"]),
        warmup_steps=section.warmup.epochs * steps,
    )
    learner.optimizer = optimizer
    reporter, samples = Reporter(learner), 0
    for epoch in range(1, job.epochs + 1):
        optimizer.train()
        totals = learner.train(epoch, 0, (section.initial,) * steps, WHOLE)
        samples += totals.samples
        if not math.isfinite(totals.loss):
            reporter.give_up(f"epoch {epoch}")
            break
        with reporter.pause():
            optimizer.eval()
            batches = _batches(learner, epoch, range(min(steps, _NORM_BATCHES)))
            torch.optim.swa_utils.update_bn((x for x, _ in batches), learner.model)
        reporter.look(samples, epoch)
    return reporter.finish(samples, section.initial)


def train_after_lr_find(job: Job, by: str) -> Outcome:
    """Lightning's range test with its defaults on the job's network and data, then the job's
    schedule from the rate that it suggests; the job's own rate where it suggests none.

    `by`: "lightning", its own suggestion; or "step", where the smoothed loss falls most from
    one update to the next, as Lightning suggested before 2.5.3. Since then it divides by the
    difference of the rates, which is least among the smallest: its issue 21141.
    """
    section, started_s = _section(job), monotonic_s()
    found, samples = _lr_found(job, by)
    seconds = monotonic_s() - started_s
    lr = section.initial if found is None else found
    tuned = section.model_copy(update={"initial": lr})
    outcome = train_in_process(job.model_copy(update={"learning_rate": tuned}))
    outcome.notes.append({"suggested_lr": found})
    outcome.search_samples += samples
    outcome.samples += samples
    outcome.seconds += seconds
    outcome.curve = [
        Point(point.samples + samples, point.seconds + seconds, point.accuracy)
        for point in outcome.curve
    ]
    return outcome


def _lr_found(job: Job, by: str) -> tuple[float | None, int]:
    """The suggestion, and the samples trained for it."""
    import lightning.pytorch as pl
    from lightning.pytorch.tuner.tuning import Tuner

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    learner = open_learner(job)
    batches = _EndlessBatches(learner)

    class Module(pl.LightningModule):
        """`lr` is the attribute that Lightning looks for."""

        def __init__(self) -> None:
            super().__init__()
            self.network, self.lr = learner.model, _section(job).initial

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            return cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=self.lr, **job.optimizer.args)

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        finder = Tuner(trainer).lr_find(Module(), DataLoader(batches, batch_size=None))
    assert finder is not None  # it is None for fast_dev_run only
    found = finder.suggestion() if by == "lightning" else _steepest(finder.results)
    return found, len(finder.results["loss"]) * job.global_batch_size


def _steepest(results: Mapping[str, Sequence[float]], skip_begin: int = 10) -> float:
    """The rate at the steepest fall per update; with the updates that Lightning leaves out."""
    losses = np.array(results["loss"][skip_begin:-1])
    gradients = np.where(np.isfinite(losses), np.gradient(losses), np.inf)
    return results["lr"][skip_begin + int(np.nanargmin(gradients))]


class _EndlessBatches(IterableDataset[tuple[Tensor, Tensor]]):
    """The learner's training batches, epoch after epoch."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        steps = self.learner.info.train_size // self.learner.job.global_batch_size
        for epoch in count(1):
            yield from _batches(self.learner, epoch, range(steps))


def _batches(learner: Learner, epoch: int, steps: range) -> Iterator[tuple[Tensor, Tensor]]:
    """x and y of whole batches, augmented as in training."""
    size = learner.job.global_batch_size
    for batch in learner.data.train(epoch, steps, range(1), 1, size):
        yield batch.x, batch.y


def _section(job: Job) -> SchedulePolicy:
    assert isinstance(job.learning_rate, SchedulePolicy)
    return job.learning_rate
