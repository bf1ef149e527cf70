"""Protocols of a run's backend: two pools, the states that travel between them, and nodes.

Implemented on Ray (`ray_pool`, `state_store`) and within this process (`in_process`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from raytrain_opt.errors import PoolError
from raytrain_opt.pools.commands import Command, Progress, SendInitialState, StateRef
from raytrain_opt.pools.main_training import MainTraining
from raytrain_opt.recording.spans import Event, Span
from raytrain_opt.train.state import TrainingState

# Called about twice a second while a pool works: its name, and its slowest resident's progress.
# Returns whether the command, which is a main training then, shall end before its last step.
OnWait = Callable[[str, Progress | None], object]


class States(Protocol):
    """Access to states by reference, as workers and slots need it."""

    def get(self, ref: StateRef) -> TrainingState:
        """Return the state, read-only."""

    def put(self, state_id: str, state: TrainingState) -> StateRef:
        """Store a state, which may change as soon as this returns."""


class StateStore(States, Protocol):
    """The driver's access to states."""

    def keep(self, ref: StateRef) -> None:
        """Keep this state and the one kept before it available; release all others."""


class Pool(Protocol):
    """Resident processes of one kind, workers or slots."""

    on_wait: OnWait | None

    @property
    def name(self) -> str:
        """The kind: worker or slot."""

    @property
    def size(self) -> int:
        """Number of residents at the start."""

    @property
    def has_trained(self) -> bool:
        """Whether any resident of the run has finished a training step."""

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

    def drain_log(self) -> tuple[list[Span], list[Event]]:
        """Return spans and events since the last call, on this process's clock."""

    def restarts(self) -> int:
        """Return how often a resident was restarted."""


def fetch_initial_state(pool: Pool) -> StateRef:
    """Return the initial state of the first resident that can send it.

    Raises PoolError when none can.
    """
    for index in pool.alive():
        replies = pool.command(SendInitialState(index), (index,))
        if replies:  # else this resident was lost meanwhile
            state: StateRef = replies[index]
            return state
    raise PoolError(f"no {pool.name} is left to send its initial state")


@dataclass(frozen=True)
class Backend:
    """The processes and states that a run uses.

    Without `slots`, workers train the candidates, if there are any. `search_reason`: why, where
    that was chosen.
    """

    workers: Pool
    slots: Pool | None
    states: StateStore
    main_training: MainTraining
    use_gpu: bool
    node_resources: Callable[[], list[dict[str, float]]]
    search_reason: str = ""

    @property
    def search(self) -> tuple[Literal["slots", "workers"], str]:
        """Who trains candidates, and why."""
        return "workers" if self.slots is None else "slots", self.search_reason

    @property
    def pools(self) -> list[Pool]:
        """Both pools, or the workers alone."""
        return [self.workers] if self.slots is None else [self.workers, self.slots]
