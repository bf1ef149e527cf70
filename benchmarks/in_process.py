"""A run of the product in this process, without Ray, which is observed for a comparison.

The run is `raytrain-opt run --in-process`, in a temporary folder. `ObservedRun` reports how many
samples were trained, and the accuracy on the test split, by which nothing is decided.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import torch

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.data import ArraysData
from raytrain_opt.config.schema import Job
from raytrain_opt.data import load_shared_data
from raytrain_opt.driver import open_run, train
from raytrain_opt.errors import DivergedError
from raytrain_opt.execution.training_run import TrainingRun
from raytrain_opt.pools.commands import StateRef
from raytrain_opt.search.policy import CandidateResult, Decision, TryCandidates
from raytrain_opt.train.data_parallel import Parallel
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig

# About this many test images are evaluated after an epoch; all of them after the last.
_GLANCE = 2500


@dataclass(frozen=True)
class Point:
    """A measurement after an epoch.

    `samples`: trained so far, those of the search included. `seconds`: spent so far, without the
    evaluation of the test split. `accuracy`, `loss`: on a part of the test split.
    """

    samples: int
    seconds: float
    accuracy: float
    loss: float = math.nan


@dataclass
class Outcome:
    """The result of one training.

    `accuracy`: on the full test split after the last epoch; if the training diverged, that of
    guessing. `search_samples`: samples beyond those behind the final weights. `train_accuracy`: on
    all training images without augmentation, where it is asked for.
    """

    accuracy: float = math.nan
    validation_accuracy: float = math.nan
    train_accuracy: float = math.nan
    samples: int = 0
    search_samples: int = 0
    seconds: float = 0.0
    peak_lr: float = math.nan
    last_lr: float = math.nan
    diverged: str = ""
    curve: list[Point] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return numbers, texts, lists and dicts only."""
        return asdict(self)


def train_in_process(job: Job, *, on_training_images: bool = False) -> Outcome:
    """Train the job on one thread; a training that diverges has an outcome, too.

    on_training_images: also measure the final accuracy on them; the data are arrays.
    """
    with observed_run(job) as run:
        try:
            train(run)
            if on_training_images:
                run.outcome.train_accuracy = _accuracy_on_training_images(job, run.learner)
        except DivergedError as error:
            run.give_up(str(error))
        return run.finish()


@contextmanager
def observed_run(job: Job) -> Iterator[ObservedRun]:
    """Start the job's run on one thread; its records and its output are not kept."""
    workers = job.workers.model_copy(update={"threads": 1})
    checkpoint = job.checkpoint.model_copy(update={"every_epochs": job.epochs})
    with TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        sections = {"workers": workers, "checkpoint": checkpoint, "storage_path": folder}
        with open_run(job.model_copy(update=sections), in_process=True) as run:
            yield ObservedRun(run)


def open_learner(job: Job, connect: type[Parallel] = Parallel) -> Learner:
    """Build the job's learner on the CPU, with its data; `connect`: exchanges its gradients."""
    config, shared = LearnerConfig.from_job(job), load_shared_data(job.data)
    return Learner(config, shared, torch.device("cpu"), connect)


def _accuracy_on_training_images(job: Job, trained: Learner) -> float:
    assert isinstance(job.data, ArraysData)
    data = job.data.model_copy(update={"test": job.data.train})
    learner = open_learner(job.model_copy(update={"data": data}))
    try:
        learner.model.load_state_dict(trained.model.state_dict())
        return learner.evaluate("test").means["accuracy"]
    finally:
        learner.close()


class ObservedRun:
    """A run whose accuracy is measured beside it; implements `driver.Run`.

    The time of these measurements does not count.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._run, self.outcome = run, Outcome()
        workers: Any = run.pools.workers
        self.learner: Learner = workers.resident.learner
        self._parts = max(1, run.info.test_size // _GLANCE)
        self._started_s, self._measuring_s = monotonic_s(), 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def pretrain(self, state: StateRef, action: TryCandidates) -> Sequence[CandidateResult]:
        self._results = self._run.pretrain(state, action)
        return self._results

    def state_after(self, state: StateRef, action: TryCandidates, decision: Decision) -> StateRef:
        """Note the round."""
        results = self._results
        winner = None if decision.winner is None else decision.winner.candidate.lr
        self.outcome.notes.append(
            {
                "epoch": action.epoch,
                "lrs": [result.candidate.lr for result in results],
                "losses": [result.val_loss for result in results],
                "steps": action.pretrain_steps,
                "kept_steps": action.kept_steps,
                "winner": winner,
                "next_base_lr": decision.next_base_lr,
                "reason": decision.reason,
            }
        )
        return self._run.state_after(state, action, decision)

    def evaluate(self, state: StateRef, epoch: int) -> None:
        """Evaluate a part of the test split after an epoch, and all of it after the last."""
        job, began_s = self._run.job, monotonic_s()
        if epoch % job.evaluate.every_epochs and epoch != job.epochs:
            return
        part = self.learner.evaluate("test", 0, self._parts)
        seconds = began_s - self._started_s - self._measuring_s
        point = Point(self._run.progress.samples, seconds, part.means["accuracy"], part.loss)
        self.outcome.curve.append(point)
        if epoch == job.epochs:
            self.outcome.accuracy = self.learner.evaluate("test").means["accuracy"]
            if self.learner.info.validation_size:
                validation = self.learner.evaluate("validation")
                self.outcome.validation_accuracy = validation.means["accuracy"]
        self._measuring_s += monotonic_s() - began_s

    def give_up(self, why: str) -> None:
        """Report a training that diverged with the accuracy of guessing."""
        guessing = 1 / self.learner.info.num_classes
        self.outcome.accuracy = self.outcome.validation_accuracy = guessing
        self.outcome.diverged = why

    def finish(self) -> Outcome:
        """Return the outcome after the training."""
        run, outcome = self._run, self.outcome
        outcome.samples, outcome.search_samples = run.progress.samples, run.progress.search_samples
        outcome.peak_lr = max(run.lrs, default=math.nan)
        outcome.last_lr = run.lrs[-1] if run.lrs else math.nan
        outcome.seconds = monotonic_s() - self._started_s - self._measuring_s
        return outcome
