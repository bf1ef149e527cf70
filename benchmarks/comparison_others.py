"""Lightning's lr_find on the product's learner."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, product

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.in_process import Outcome, open_learner, train_in_process
from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.learning_rate import SchedulePolicy
from raytrain_opt.config.schema import Job
from raytrain_opt.train.learner import Learner


def train_after_lr_find(job: Job, by: str) -> Outcome:
    """Train the job's schedule from the rate that Lightning's range test suggests.

    The range test has its default settings; the job's own rate is used if it suggests none.
    `by`: "lightning", its own suggestion; or "step", the rate at which the smoothed loss falls
    most from one update to the next, which was the suggestion before 2.5.3. Since then Lightning
    divides by the difference of the rates, which is smallest among the smallest rates (its issue
    21141).
    """
    section, started_s = _section(job), monotonic_s()
    suggestion, samples = _suggest_lr(job, by)
    seconds = monotonic_s() - started_s
    lr = section.initial if suggestion is None else suggestion
    tuned = section.model_copy(update={"initial": lr})
    outcome = train_in_process(job.model_copy(update={"learning_rate": tuned}))
    outcome.notes.append({"suggested_lr": suggestion})
    outcome.search_samples += samples
    outcome.samples += samples
    outcome.seconds += seconds
    outcome.curve = [
        replace(point, samples=point.samples + samples, seconds=point.seconds + seconds)
        for point in outcome.curve
    ]
    return outcome


def _suggest_lr(job: Job, by: str) -> tuple[float | None, int]:
    """Return the suggestion and the samples trained for it."""
    import lightning.pytorch as pl
    from lightning.pytorch.tuner.tuning import Tuner

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    learner = open_learner(job)
    batches = _EndlessBatches(learner)

    class Module(pl.LightningModule):  # type: ignore[misc]  # Lightning is optional
        """The network; Lightning sets its `lr`."""

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
    assert finder is not None  # None for fast_dev_run only
    suggestion = finder.suggestion() if by == "lightning" else _steepest(finder.results)
    return suggestion, len(finder.results["loss"]) * job.global_batch_size


def _steepest(results: Mapping[str, Sequence[float]], skip_begin: int = 10) -> float:
    """Return the rate at the steepest fall per update, skipping the updates Lightning skips."""
    losses = np.array(results["loss"][skip_begin:-1])
    gradients = np.where(np.isfinite(losses), np.gradient(losses), np.inf)
    return results["lr"][skip_begin + int(np.nanargmin(gradients))]


class _EndlessBatches(IterableDataset[tuple[Tensor, Tensor]]):
    """The learner's training batches without end, epoch after epoch."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        steps = self.learner.info.train_size // self.learner.config.global_batch_size
        for epoch in count(1):
            yield from _batches(self.learner, epoch, range(steps))


def _batches(learner: Learner, epoch: int, steps: range) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield x and y of global batches, augmented as in training."""
    size = learner.config.global_batch_size
    for batch in learner.data.train_batches(epoch, product(steps, range(1)), 1, size):
        yield batch.x, batch.y


def _section(job: Job) -> SchedulePolicy:
    assert isinstance(job.learning_rate, SchedulePolicy)
    return job.learning_rate
