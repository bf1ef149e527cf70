"""Main training and evaluation by all workers: the interface, and the synchronous kind.

The asynchronous kind is `async_training.main_training`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from raytrain_opt.pools.commands import (
    Evaluate,
    EvaluateReply,
    MainTrain,
    MainTrainReply,
    StateRef,
)
from raytrain_opt.results import EvalTotals, TrainTotals

if TYPE_CHECKING:
    from raytrain_opt.pools.protocol import Pool


@dataclass(frozen=True)
class TrainingOutcome:
    """The end of a main training.

    `totals` over all workers. `loaded_sha256`: digest of the state that each worker loaded.
    `timings_s`: seconds of the slowest worker by name. `workers`: how many finished it.
    `parallel`: how gradients were exchanged. `staleness`: of asynchronous training.
    """

    state: StateRef
    totals: TrainTotals
    loaded_sha256: tuple[str | None, ...]
    timings_s: dict[str, float]
    workers: int
    parallel: dict[str, object] = field(default_factory=dict)
    staleness: dict[str, object] | None = None


class MainTraining(Protocol):
    """How the workers train and evaluate."""

    def train(self, command: MainTrain, *, check: bool) -> TrainingOutcome:
        """Train the steps of the command. `check`: compute digests of the loaded states."""

    def evaluate(self, state: StateRef) -> EvalTotals:
        """Evaluate on the test split, each sample once."""


class SynchronousTraining:
    """All workers compute each step together, as one process group."""

    def __init__(self, workers: Pool) -> None:
        self._workers = workers

    def train(self, command: MainTrain, *, check: bool) -> TrainingOutcome:
        """Train the steps on all workers. Digests cost no time: workers hash while they train."""
        by_rank: dict[int, MainTrainReply] = self._workers.command(command)
        replies = [reply for _, reply in sorted(by_rank.items())]
        first = replies[0]
        assert first.state is not None  # rank 0 sends the state
        timings_s = {
            "compute_s": max(reply.totals.duration_s for reply in replies),
            "data_wait_s": max(reply.totals.data_wait_s for reply in replies),
        }
        for name in ("load_s", "average_s", "hand_over_s"):
            timings_s[name] = max(reply.timings_s.get(name, 0.0) for reply in replies)
        return TrainingOutcome(
            first.state,
            first.totals,
            tuple(reply.loaded_sha256 for reply in replies),
            timings_s,
            len(replies),
            first.parallel,
        )

    def evaluate(self, state: StateRef) -> EvalTotals:
        """Evaluate on all workers."""
        replies: dict[int, EvaluateReply] = self._workers.command(Evaluate(state))
        return replies[0].totals
