"""Both pools in this process, without Ray: for debuggers, tests and benchmarks.

One `Learner` serves as the only slot and the only worker, one command after the other. It computes
all micro-batches of a global batch itself, so any number of `workers.count` gives the same
updates.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.learning_rate import CandidateBatch
from raytrain_opt.config.schema import WorkersSection
from raytrain_opt.data.factory import SharedData
from raytrain_opt.errors import RaytrainOptError, ResourcesError
from raytrain_opt.pools.commands import (
    SLOT_POOL,
    WORKER_POOL,
    Command,
    Progress,
    StateRef,
    to_failure,
)
from raytrain_opt.pools.interface import OnWait, Pools, SynchronousTraining
from raytrain_opt.pools.worker import Slot, Worker
from raytrain_opt.random_state import preserve_random_state
from raytrain_opt.recording.records import Event
from raytrain_opt.threads import available_cores
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.state import TrainingState

# As often as a Ray pool reports its progress: often enough for a bar, and free of charge.
_REPORT_EVERY_S = 0.5


class InProcessStates:
    """States in this process's memory, which the reference itself keeps alive."""

    def get(self, ref: StateRef) -> TrainingState:
        state: TrainingState = ref.ref
        return state

    def put(self, state_id: str, state: TrainingState) -> StateRef:
        """Copy the state: its tensors may share the memory of a model that trains on."""
        return StateRef(state_id, copy.deepcopy(state))

    def keep(self, ref: StateRef, *others: StateRef) -> None:
        """Do nothing: a state lives as long as a reference to it."""


class InProcessPool:
    """A pool of one resident; `before` precedes each command. Implements `protocol.Pool`."""

    size = 1

    def __init__(
        self, name: str, resident: Slot | Worker, before: Callable[[], None] = lambda: None
    ) -> None:
        self.name = name
        self.on_wait: OnWait | None = None
        self.resident, self._before = resident, before
        self._next_report_s = 0.0

    def start(self) -> None:
        """Do nothing: the resident exists already."""

    def wait_until_ready(self, limit_s: float) -> None:
        """Return at once."""

    def alive(self) -> tuple[int, ...]:
        return (0,)

    def grow(self) -> None:
        """Do nothing: there is one resident."""

    def command(self, command: Command, expected: Sequence[int] | None = None) -> dict[int, Any]:
        self._before()
        try:
            reply = self.resident.handle(command, self._on_step)
        except RaytrainOptError:
            raise
        except Exception as error:
            raise to_failure(error).to_error(f"{self.name} 0") from error
        return {0: reply}

    def _on_step(self, done: int, total: int) -> None:
        due = monotonic_s() >= self._next_report_s or done == 1
        if due and self.on_wait is not None:
            self._next_report_s = monotonic_s() + _REPORT_EVERY_S
            self.on_wait(self.name, Progress(done, total))

    def new_events(self) -> list[Event]:
        return []

    def restarts(self) -> int:
        return 0


def in_process_pools(
    learner: Learner, *, with_slots: bool, candidate_batch: CandidateBatch | None
) -> Pools:
    """Build both pools on one learner; without slots, the worker trains the candidates."""
    states = InProcessStates()
    worker = Worker(learner, 0, 1, states)
    workers = InProcessPool(WORKER_POOL, worker)
    slots = None
    if with_slots:
        # A command to the slot changes the learner's state behind the worker's back.
        slot = Slot(learner, 0, states, candidate_batch)
        slots = InProcessPool(SLOT_POOL, slot, worker.forget_state)
    return Pools(
        workers,
        slots,
        states,
        SynchronousTraining(workers),
        learner.device.type == "cuda",
        _this_node,
    )


@contextmanager
def open_learner(
    config: LearnerConfig, workers: WorkersSection, shared: SharedData
) -> Iterator[Learner]:
    """Build the learner, on a GPU if workers may use one and there is one; close it afterwards.

    Raises ResourcesError if they must and there is none.
    """
    use_gpu = workers.uses_gpu(torch.cuda.is_available())
    if use_gpu and not torch.cuda.is_available():
        raise ResourcesError("workers.use_gpu: true, but torch finds no GPU; use auto or false")
    torch.set_num_threads(workers.threads or available_cores())
    device = torch.device("cuda" if use_gpu else "cpu")
    with preserve_random_state(device), closing(Learner(config, shared, device)) as learner:
        yield learner


def _this_node() -> list[dict[str, float]]:
    node = {"CPU": float(os.cpu_count() or 1)}
    if torch.cuda.is_available():
        node["GPU"] = float(torch.cuda.device_count())
    return [node]
