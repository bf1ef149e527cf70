"""A run from the job file to its result. `train` is the algorithm.

It is short-term pre-training (STPT): candidates, each a learning rate, train a few steps from the
same state, and the training continues at the rate of the best. docs/concepts.md has a glossary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.schema import Job
from raytrain_opt.execution.backend import open_backend
from raytrain_opt.execution.resolve import resolve
from raytrain_opt.execution.resume import find_run
from raytrain_opt.execution.workspace import open_frontend, open_workspace
from raytrain_opt.paths import mark_ended
from raytrain_opt.search.policy import (
    CandidateResult,
    Decision,
    EpochLosses,
    History,
    Policy,
    StartAgain,
    TrainEpoch,
    TryCandidates,
)

if TYPE_CHECKING:
    from raytrain_opt.execution.result import RunResult
    from raytrain_opt.execution.training_run import TrainingRun

State = TypeVar("State")


class Run(Protocol[State]):
    """The moves of an execution, each one line of `train`. States are opaque to the driver."""

    @property
    def policy(self) -> Policy:
        """The rule that decides."""

    @property
    def history(self) -> History:
        """All decisions and losses of the run at its start: empty, unless it was resumed."""

    @property
    def epochs_left(self) -> Iterable[int]:
        """Numbers of the epochs to train, counted from 1."""

    def initial_state(self) -> State:
        """Return the state to start from: new weights, or the last checkpoint's."""

    def estimate_length(self, state: State, history: History) -> History:
        """Return the history with the length of the training, where the job gives a time."""

    def pretrain(self, state: State, action: TryCandidates) -> Sequence[CandidateResult]:
        """Train and score every candidate, each from `state` and on the same batches."""

    def state_after(self, state: State, action: TryCandidates, decision: Decision) -> State:
        """Return the winner's state after the steps that are kept; `state` if there are none."""

    def start_again(self, action: StartAgain) -> State:
        """Return the initial state."""

    def checkpoint_search(self, state: State, history: History) -> None:
        """Save the run, so that a resumed one does not repeat the round or the restart."""

    def train_epoch(self, state: State, action: TrainEpoch) -> tuple[State, EpochLosses]:
        """Train the rest of the epoch on all workers; return the new state and the mean losses.

        With shape plateau, the negative score in place of the training loss. Raises
        DivergedError if the loss is not finite.
        """

    def evaluate(self, state: State, epoch: int) -> None:
        """Measure the test metrics; only every `evaluate.every_epochs` and after the last."""

    def checkpoint_epoch(self, state: State, history: History) -> None:
        """Record the epoch; save the run if that is due and the state is finite."""


def run(
    job: Job,
    *,
    address: str | None = None,
    in_process: bool = False,
    verbose: bool = False,
    resume: str | None = None,
    started_s: float | None = None,
) -> RunResult:
    """Train a job and return its result.

    address: Ray cluster ("auto", "ray://…", host:port). Default: RAY_ADDRESS; without
        it, Ray is started on this machine and shut down afterwards. A Ray that the caller has
        initialized is used and left running.
    in_process: train in this process, without Ray, one candidate after the other.
    resume: run directory of an earlier run of this job, which continues from its last
        checkpoint, for as many epochs as the job says now. Default: as the job's `resume` says.
    started_s: monotonic time from which the start-up time counts.

    Raises RaytrainOptError; checkpoints stay in the run directory.
    """
    with open_run(job, address, in_process, verbose, resume, started_s) as training_run:
        from raytrain_opt.execution.result import finish

        train(training_run)
        result = finish(training_run)
    mark_ended(result.run_dir)  # after Ray's end, which takes seconds in which a kill may come
    return result


@contextmanager
def open_run(
    job: Job,
    address: str | None = None,
    in_process: bool = False,
    verbose: bool = False,
    resume: str | None = None,
    started_s: float | None = None,
) -> Iterator[TrainingRun]:
    """Start all that trains a job, and end it afterwards; for the arguments see `run`."""
    job, resume = find_run(job, resume)
    with (
        open_frontend(monotonic_s() if started_s is None else started_s) as frontend,
        open_backend(job, frontend, in_process, address, verbose, resume is not None) as backend,
    ):
        facts = backend.read()  # on Ray, in a thread while Ray starts
        with open_workspace(job, frontend, resume, facts.info, backend.options) as workspace:
            placement = backend.place(facts)
            batch_size = backend.find_batch_size(facts, placement, workspace)
            resolved = resolve(job, facts, placement, batch_size)
            workspace.write_job(resolved.job)
            # Not at the top: it loads torch, which is imported while Ray starts.
            from raytrain_opt.execution.result import open_training_run

            with (
                backend.start(resolved, workspace) as pools,
                open_training_run(resolved, pools, workspace) as training_run,
            ):
                yield training_run


def train(run: Run[State]) -> None:
    """Algorithm 1 of Yamada et al. (STPT), or any other policy: it decides, the run acts."""
    state = run.initial_state()
    history = run.history
    for epoch in run.epochs_left:
        history = run.estimate_length(state, history)
        # Search: every candidate trains a few steps from `state`; continue from the winner's.
        while not isinstance(action := run.policy.next(epoch, history), TrainEpoch):
            if isinstance(action, StartAgain):  # the training collapsed: see search/collapse
                history = history.after_restart(action)
                state = run.start_again(action)
            else:
                results = run.pretrain(state, action)
                decision = run.policy.decide(action, results, history)
                state = run.state_after(state, action, decision)
                history = run.estimate_length(state, history.after_round(decision))
            run.checkpoint_search(state, history)
        # Train: all workers together, the rest of the epoch at the decided rates.
        state, losses = run.train_epoch(state, action)
        history = history.after_epoch(losses)
        run.evaluate(state, epoch)
        run.checkpoint_epoch(state, history)
