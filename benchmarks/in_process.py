"""A run of the product in this process, without Ray, which is observed for a comparison.

`ObservedRun` is the product's run on its in-process pools (`raytrain-opt run --in-process`),
without records and checkpoints. It reports how many samples were trained, and the accuracy on the
test split, by which nothing is decided.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.unrecorded import NullCheckpoints, NullRecorder
from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.data import ArraysData
from raytrain_opt.config.schema import Job
from raytrain_opt.data import load_shared_data
from raytrain_opt.driver import train
from raytrain_opt.errors import DivergedError
from raytrain_opt.execution.callbacks import Callbacks
from raytrain_opt.execution.check import try_job
from raytrain_opt.execution.progress import Startup
from raytrain_opt.execution.resolve import Placement, Resolved, resolve
from raytrain_opt.execution.signals import StopRequest
from raytrain_opt.execution.training_run import TrainingRun
from raytrain_opt.execution.workspace import Workspace
from raytrain_opt.paths import RunPaths
from raytrain_opt.pools.commands import StateRef
from raytrain_opt.pools.in_process import in_process_pools
from raytrain_opt.recording.recorder import EventLog
from raytrain_opt.search.policy import Decision, TryCandidates
from raytrain_opt.terminal import Terminal
from raytrain_opt.train.checkpoint import Checkpoints
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches

WHOLE = MicroBatches(range(1), 1)
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


def open_learner(job: Job) -> Learner:
    """Build the job's learner on the CPU, with its data."""
    return Learner(LearnerConfig.from_job(job), load_shared_data(job.data), torch.device("cpu"))


def resolve_here(job: Job) -> Resolved:
    """Resolve a job with the workers that it asks for."""
    facts, *_ = try_job(job)
    return resolve(job, facts, Placement.from_job(job), job.global_batch_size)


def train_in_process(job: Job, *, on_training_images: bool = False) -> Outcome:
    """Train the job; a training that diverges has an outcome, too.

    on_training_images: also measure the final accuracy on them; the data are arrays.
    """
    resolved = resolve_here(job)
    learner = Learner(resolved.learner, load_shared_data(job.data), torch.device("cpu"))
    run = ObservedRun(resolved, learner)
    try:
        train(run)
        if on_training_images:
            run.reporter.outcome.train_accuracy = _accuracy_on_training_images(job, learner)
    except DivergedError as error:
        run.reporter.give_up(str(error))
    finally:
        learner.close()
    return run.finish()


def _accuracy_on_training_images(job: Job, trained: Learner) -> float:
    assert isinstance(job.data, ArraysData)
    data = job.data.model_copy(update={"test": job.data.train})
    learner = open_learner(job.model_copy(update={"data": data}))
    try:
        learner.model.load_state_dict(trained.model.state_dict())
        return learner.evaluate("test").means["accuracy"]
    finally:
        learner.close()


class Reporter:
    """Measures accuracies for the comparison; keeps their time out of the training's."""

    def __init__(self, learner: Learner, job: Job) -> None:
        assert job.epochs is not None
        self.learner, self.outcome, self.epochs = learner, Outcome(), job.epochs
        self._parts = max(1, learner.info.test_size // _GLANCE)
        self._started_s, self.reporting_s = monotonic_s(), 0.0

    def seconds(self) -> float:
        """Return the seconds of training and searching so far."""
        return monotonic_s() - self._started_s - self.reporting_s

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out the time that is spent inside."""
        began_s = monotonic_s()
        yield
        self.reporting_s += monotonic_s() - began_s

    def look(self, samples: int, epoch: int) -> None:
        """Evaluate a part of the test split after an epoch, and all of it after the last."""
        spent_s = self.seconds()
        with self.pause():
            part = self.learner.evaluate("test", 0, self._parts)
            self.outcome.curve.append(Point(samples, spent_s, part.means["accuracy"], part.loss))
            if epoch == self.epochs:
                self.outcome.accuracy = self.learner.evaluate("test").means["accuracy"]
                if self.learner.info.validation_size:
                    validation = self.learner.evaluate("validation")
                    self.outcome.validation_accuracy = validation.means["accuracy"]

    def give_up(self, why: str) -> None:
        """Report a training that diverged with the accuracy of guessing."""
        guessing = 1 / self.learner.info.num_classes
        self.outcome.accuracy = self.outcome.validation_accuracy = guessing
        self.outcome.diverged = why

    def finish(self, samples: int, peak_lr: float, search_samples: int = 0) -> Outcome:
        """Add all samples, those of the search included, and the highest rate."""
        outcome = self.outcome
        outcome.samples, outcome.search_samples = samples, search_samples
        outcome.peak_lr, outcome.seconds = peak_lr, self.seconds()
        return outcome


class ObservedRun(TrainingRun):
    """One execution of a job on one learner, without a run directory."""

    def __init__(self, resolved: Resolved, learner: Learner) -> None:
        job, began_s = resolved.job, monotonic_s()
        terminal, recorder = Terminal(Console(quiet=True)), NullRecorder()
        event_log, paths = EventLog(recorder, terminal.note, began_s), RunPaths(Path(job.name))
        checkpoints = Checkpoints(paths.checkpoints, job.checkpoint)
        super().__init__(
            resolved,
            in_process_pools(
                learner,
                with_slots=resolved.candidates > 0 and job.search_on == "slots",
                candidate_batch=job.learning_rate.candidate_batch,
            ),
            Workspace(
                terminal, StopRequest(), Startup(began_s), paths, checkpoints, lambda _: None
            ),
            recorder,
            NullCheckpoints(),
            event_log,
            Callbacks(job, paths, event_log),
        )
        self.reporter = Reporter(learner, job)

    def finish(self) -> Outcome:
        """Return the outcome after the training."""
        peak_lr = max(self.lrs, default=math.nan)
        self.reporter.outcome.last_lr = self.lrs[-1] if self.lrs else math.nan
        return self.reporter.finish(self.progress.samples, peak_lr, self.progress.search_samples)

    def state_after(self, state: StateRef, action: TryCandidates, decision: Decision) -> StateRef:
        """Note the round for the comparison."""
        results = self._epoch.results
        winner = None if decision.winner is None else decision.winner.candidate.lr
        self.reporter.outcome.notes.append(
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
        return super().state_after(state, action, decision)

    def evaluate(self, state: StateRef, epoch: int) -> None:
        """Evaluate the test split for the comparison; the learner holds `state`."""
        if epoch % self.job.evaluate.every_epochs and epoch != self.job.epochs:
            return
        self.reporter.look(self.progress.samples, epoch)
