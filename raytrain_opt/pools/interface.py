"""What a run commands: pools, states and training, on Ray or in one process (`in_process`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from raytrain_opt.clock import monotonic_s
from raytrain_opt.errors import PoolError
from raytrain_opt.pools.commands import (
    Command,
    Evaluate,
    MainTrain,
    MainTrainReply,
    Pretrain,
    Progress,
    SendInitialState,
    StateRef,
)
from raytrain_opt.recording.records import Event
from raytrain_opt.results import EvalTotals, Predictions, Split, TrainTotals

if TYPE_CHECKING:
    from raytrain_opt.train.state import TrainingState

# Called about twice a second while a pool works: its name, and its slowest resident's progress.
OnWait = Callable[[str, Progress | None], object]
# Returns whether a main training shall send its state now, before its last step.
IsDue = Callable[[], bool]

# Of a segment, about: a command to 2 workers costs 7 ms (0.2 %), and a signal waits for its end.
_SEGMENT_S = 3.0
# The first steps of a process take longer than the others, so segments grow to that length.
_GROWTH = 8


class States(Protocol):
    """Access to states by reference, as workers and slots need it."""

    def get(self, ref: StateRef) -> TrainingState:
        """Return the state, read-only."""

    def put(self, state_id: str, state: TrainingState) -> StateRef:
        """Store a state, which may change as soon as this returns."""


class StateStore(States, Protocol):
    """The driver's access to states."""

    def keep(self, ref: StateRef, *others: StateRef) -> None:
        """Keep these states and the first one kept before available; release all others."""


class Pool(Protocol):
    """Resident processes of one kind, workers or slots."""

    name: str  # the kind: worker or slot
    size: int  # at the start
    on_wait: OnWait | None

    def start(self) -> None:
        """Start the residents without waiting for them. Further calls do nothing."""

    def wait_until_ready(self, limit_s: float) -> object:
        """Wait until every resident has joined. Raises PoolError after `limit_s` seconds."""

    def alive(self) -> tuple[int, ...]:
        """Return the residents that are running or being restarted."""

    def grow(self) -> None:
        """Start residents that are missing, where the pool may and the cluster has room."""

    def command(self, command: Command, expected: Sequence[int] | None = None) -> dict[int, Any]:
        """Post a command; return the replies of the expected residents (default: all).

        Residents that died too often are missing. Raises PoolError if the pool ended.
        """

    def new_events(self) -> list[Event]:
        """Return the events since the last call, on this process's clock."""

    def restarts(self) -> int:
        """Return how often a resident was restarted."""


@dataclass(frozen=True)
class TrainingOutcome:
    """A main training up to a state that was sent."""

    state: StateRef
    totals: TrainTotals  # over all workers
    timings_s: dict[str, float]  # of the slowest worker, by name
    workers: int  # how many finished it
    staleness: Counter[int] | None = None  # of asynchronous training: gradients by staleness


class MainTraining(Protocol):
    """How the workers train and evaluate."""

    def train(self, command: MainTrain, *, is_due: IsDue = lambda: False) -> TrainingOutcome:
        """Train the steps until the command's end, or at least one, until `is_due`."""

    def evaluate(self, state: StateRef, split: Split = "test") -> EvalTotals:
        """Evaluate on the split, each sample once."""


def slowest(timings: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the seconds of the slowest worker, for each entry separately."""
    result: dict[str, float] = {}
    for worker in timings:
        for name, seconds in worker.items():
            result[name] = max(seconds, result.get(name, 0.0))
    return result


class Segments:
    """Commands to a pool, cut into segments of a few seconds."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._steps = 1  # of the next one

    def command(
        self, command: MainTrain | Pretrain, is_due: IsDue, expected: Sequence[int] | None = None
    ) -> dict[int, Any]:
        """Execute a command until its end, or at least one step, until `is_due`."""
        done = 0
        while done + self._steps < command.end:
            done += self._steps
            self._train(replace(command, until=done, sends=False), expected)
            if is_due():
                return self._pool.command(replace(command, until=done), expected)
        return self._pool.command(command, expected)

    def _train(self, command: MainTrain | Pretrain, expected: Sequence[int] | None) -> None:
        began_s, steps = monotonic_s(), self._steps
        self._pool.command(command, expected)
        in_time = int(steps * _SEGMENT_S / max(monotonic_s() - began_s, 1e-9))
        self._steps = max(1, min(_GROWTH * steps, in_time))


class SynchronousTraining:
    """All workers compute each step together, as one process group."""

    def __init__(self, workers: Pool) -> None:
        self._workers, self._segments = workers, Segments(workers)

    def train(self, command: MainTrain, *, is_due: IsDue = lambda: False) -> TrainingOutcome:
        """Train segments on all workers."""
        by_rank: dict[int, MainTrainReply] = self._segments.command(command, is_due)
        replies = [reply for _, reply in sorted(by_rank.items())]
        first = replies[0]
        assert first.state is not None
        return TrainingOutcome(
            first.state,
            first.totals,
            slowest([{**r.timings_s, "compute_s": r.totals.duration_s} for r in replies]),
            len(replies),
        )

    def evaluate(self, state: StateRef, split: Split = "test") -> EvalTotals:
        replies: dict[int, EvalTotals] = self._workers.command(Evaluate(state, split))
        parts = [totals.predictions for _, totals in sorted(replies.items())]
        return replace(replies[0], predictions=Predictions.join(parts))


def fetch_initial_state(pool: Pool) -> StateRef:
    """Return the initial state of the first resident that can send it, or raise PoolError."""
    for index in pool.alive():
        if replies := pool.command(SendInitialState(index), (index,)):  # else it was lost
            state: StateRef = replies[index]
            return state
    raise PoolError(f"no {pool.name} is left to send its initial state")


@dataclass(frozen=True)
class Pools:
    """The processes and states of a run. Without `slots`, workers train candidates, if any."""

    workers: Pool
    slots: Pool | None
    states: StateStore
    main_training: MainTraining
    use_gpu: bool
    node_resources: Callable[[], list[dict[str, float]]]

    @property
    def search_on(self) -> Literal["slots", "workers"]:
        return "workers" if self.slots is None else "slots"

    @property
    def all(self) -> list[Pool]:
        return [self.workers] if self.slots is None else [self.workers, self.slots]
