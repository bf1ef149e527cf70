"""The product's algorithm on one network in this process, without Ray.

`InProcessRun` makes the moves of `raytrain_opt.training_run.TrainingRun`, so that
`raytrain_opt.driver.train` runs on it as it is, with the product's policies, schedules,
optimisers, data and learner. Only the pools are replaced: candidates are trained one after
the other. It counts what was trained, and looks at the test split to report, never to decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.schema import Job
from raytrain_opt.data import load_shared
from raytrain_opt.driver import train
from raytrain_opt.errors import DivergedError
from raytrain_opt.optim.batch_ramp import epoch_steps
from raytrain_opt.position import Position
from raytrain_opt.search import build_policy
from raytrain_opt.search.policy import Candidate, CandidateResult, Plan, Round
from raytrain_opt.train.average import averaged
from raytrain_opt.train.learner import Learner, Shares
from raytrain_opt.train.state import HostState
from raytrain_opt.train.totals import TrainTotals

WHOLE = Shares(range(1), 1)
# About as many test images are looked at after an epoch; all of them after the last.
_GLANCE = 2500


@dataclass(frozen=True)
class Point:
    """After an epoch: samples trained so far, the search's included; seconds so far, without
    looking at the test split; accuracy on a part of the test split.
    """

    samples: int
    seconds: float
    accuracy: float


@dataclass
class Outcome:
    """What came of one training. `accuracy`: on the whole test split after the last epoch;
    of a training that diverged, that of guessing.
    """

    accuracy: float = math.nan
    selection_accuracy: float = math.nan
    samples: int = 0
    search_samples: int = 0
    seconds: float = 0.0
    peak_lr: float = math.nan
    diverged: str = ""
    curve: list[Point] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Numbers, texts, lists and dicts only."""
        return asdict(self)


def open_learner(job: Job) -> Learner:
    """On CPU, with the job's data."""
    return Learner(job, load_shared(job.data), torch.device("cpu"))


def train_in_process(job: Job) -> Outcome:
    """The job's whole training; one that diverges is an outcome too."""
    learner = open_learner(job)
    run = InProcessRun(job, learner)
    try:
        train(job, run)  # type: ignore[arg-type]  # it has the moves of a TrainingRun
    except DivergedError as error:
        run.reporter.give_up(str(error))
    finally:
        learner.close()
    return run.finish()


class Reporter:
    """Accuracies for the report. The time that they take is kept out of the training's."""

    def __init__(self, learner: Learner) -> None:
        self.learner, self.outcome = learner, Outcome()
        self._parts = max(1, learner.info.test_size // _GLANCE)
        self._started_s, self.reporting_s = monotonic_s(), 0.0

    def seconds(self) -> float:
        """Of training and searching so far."""
        return monotonic_s() - self._started_s - self.reporting_s

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What is done inside only serves the report."""
        began_s = monotonic_s()
        yield
        self.reporting_s += monotonic_s() - began_s

    def look(self, samples: int, epoch: int) -> None:
        """After an epoch: a part of the test split, and all of it after the last. Nothing in the
        first half of the training, in which nobody is as good as at the end.
        """
        epochs, spent_s = self.learner.job.epochs, self.seconds()
        if 2 * epoch < epochs:
            return
        with self.pause():
            seen = self.learner.evaluate("test", 0, self._parts).accuracy
            self.outcome.curve.append(Point(samples, spent_s, seen))
            if epoch == epochs:
                self.outcome.accuracy = self.learner.evaluate("test").accuracy
                self.outcome.selection_accuracy = self.learner.evaluate("selection").accuracy

    def give_up(self, why: str) -> None:
        """It diverged: its accuracy is that of guessing."""
        guessing = 1 / self.learner.info.num_classes
        self.outcome.accuracy = self.outcome.selection_accuracy = guessing
        self.outcome.diverged = why

    def finish(self, samples: int, peak_lr: float, search_samples: int = 0) -> Outcome:
        """All that was trained, the search's samples included, and the highest rate in it."""
        outcome = self.outcome
        outcome.samples, outcome.search_samples = samples, search_samples
        outcome.peak_lr, outcome.seconds = peak_lr, self.seconds()
        return outcome


class InProcessRun:
    """One execution of a job on one learner."""

    def __init__(self, job: Job, learner: Learner) -> None:
        self.job, self.learner = job, learner
        size = learner.info.train_size
        self.steps = epoch_steps(size, job.global_batch_size, job.batch_ramp)
        self.policy = build_policy(job, self.steps)
        self.position = Position()
        self.reporter = Reporter(learner)
        self.losses: tuple[float, ...] = ()
        self._stashed: dict[int, HostState] = {}

    @property
    def samples(self) -> int:
        """Trained so far, each candidate's included."""
        return self.position.search_samples + self.position.main_samples

    def finish(self) -> Outcome:
        """After the training."""
        peak_lr = max(self.position.lrs, default=math.nan)
        return self.reporter.finish(self.samples, peak_lr, self.position.search_samples)

    def initial_state(self) -> HostState:
        """The learner's own."""
        return self.learner.state(copy=True)

    def pretrain(self, state: HostState, plan: Plan) -> list[CandidateResult]:
        """Every candidate from the same state on the same batches, one after the other."""
        self._stashed.clear()
        results = []
        for candidate in plan.candidates:
            self.learner.load(state)
            results.append(self._candidate(plan, candidate))
        self._count(search=sum(result.samples for result in results))
        return results

    def _candidate(self, plan: Plan, candidate: Candidate) -> CandidateResult:
        trained: list[TrainTotals] = []
        if plan.kept_steps:
            trained.append(self._train(plan, candidate, 0, plan.kept_steps))
            self._stashed[candidate.index] = self.learner.state(copy=True)
        if plan.kept_steps < plan.pretrain_steps:
            trained.append(self._train(plan, candidate, plan.kept_steps, plan.pretrain_steps))
        scored = self.learner.evaluate("selection", blocks=plan.paired)
        return CandidateResult.of(candidate, trained, scored, slot=0)

    def _train(self, plan: Plan, candidate: Candidate, first: int, end: int) -> TrainTotals:
        lrs = candidate.lrs(plan)[first:end]
        decay = candidate.decay * plan.decay_scale
        return self.learner.train(plan.epoch, first, lrs, WHOLE, decay=decay)

    def take_state(
        self, start: HostState, plan: Plan, results: Sequence[CandidateResult], choice: Round
    ) -> HostState:
        """The winner's after the steps that are kept; `start` where nothing is."""
        self._note(plan, results, choice)
        if choice.winner is None or plan.kept_steps == 0:
            return start
        winner = choice.winner.candidate
        self._count(lrs=winner.lrs(plan)[: plan.kept_steps])
        # What is kept is no search: it is part of the training that goes on.
        kept = plan.kept_steps * self.job.global_batch_size
        self._count(search=-kept, main=kept)
        if choice.averaged:
            return averaged([self._stashed[r.candidate.index] for r in choice.averaged])
        return self._stashed[winner.index]

    def commit_round(self, state: HostState, plan: Plan, history: tuple[Round, ...]) -> None:
        """Nothing is written."""

    def main_train(self, state: HostState, plan: Plan) -> HostState:
        """The rest of the epoch at the plan's rates."""
        self.learner.load(state)
        first = self.steps(plan.epoch) - len(plan.lrs)
        totals = self.learner.train(plan.epoch, first, plan.lrs, WHOLE, decay=plan.decay)
        self._count(main=totals.samples, lrs=plan.lrs)
        self.losses = (*self.losses, totals.loss)
        if not math.isfinite(totals.loss):
            raise DivergedError(f"epoch {plan.epoch}: the loss is not finite")
        return self.learner.state(copy=True)

    def evaluate(self, state: HostState, plan: Plan) -> None:
        """On the test split, to report. `state` is what the learner has."""
        self.reporter.look(self.samples, plan.epoch)

    def commit(self, state: HostState, plan: Plan, history: tuple[Round, ...]) -> None:
        """The position only: nothing is written."""
        self.position = replace(self.position, next_epoch=plan.epoch + 1, history=history)

    def _count(self, search: int = 0, main: int = 0, lrs: Sequence[float] = ()) -> None:
        at = self.position
        self.position = replace(
            at,
            search_samples=at.search_samples + search,
            main_samples=at.main_samples + main,
            lrs=(*at.lrs, *lrs),
        )

    def _note(self, plan: Plan, results: Sequence[CandidateResult], choice: Round) -> None:
        winner = None if choice.winner is None else choice.winner.candidate.lr
        self.reporter.outcome.notes.append(
            {
                "epoch": plan.epoch,
                "lrs": [result.candidate.lr for result in results],
                "losses": [result.val_loss for result in results],
                "steps": plan.pretrain_steps,
                "kept_steps": plan.kept_steps,
                "winner": winner,
                "next_base_lr": choice.next_base_lr,
                "reason": choice.reason,
            }
        )
