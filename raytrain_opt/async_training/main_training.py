"""Main training and evaluation by independent workers: the driver's side."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any, cast

import ray

from raytrain_opt.async_training.actors import ServerHandles
from raytrain_opt.async_training.scheduler import EpochPhase, epoch_phase
from raytrain_opt.async_training.weight_shard import advance_buffers, assemble_state
from raytrain_opt.clock import Stopwatch, monotonic_s
from raytrain_opt.cluster.connection import answer
from raytrain_opt.config.schema import TimeoutsSection
from raytrain_opt.errors import PoolError
from raytrain_opt.pools.commands import Evaluate, MainTrain, Progress, StateRef
from raytrain_opt.pools.interface import IsDue, TrainingOutcome, slowest
from raytrain_opt.pools.ray_pool import RayPool
from raytrain_opt.results import AsyncWorkerMetrics, EvalTotals, Predictions, Split, TrainTotals
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.state import TrainingState

# Seconds between checks for a restarted worker when none is left; a restart takes ten seconds.
_POLL_S = 0.5
# A phase: the shards' parts of the state, and what the workers did.
_Trained = tuple[list[TrainingState], list[AsyncWorkerMetrics], TrainTotals, Counter[int]]


class AsynchronousTraining:
    """Workers against a parameter server, without dead ones; implements `MainTraining`."""

    def __init__(
        self,
        config: LearnerConfig,
        timeouts: TimeoutsSection,
        workers: RayPool,
        server: ServerHandles,
    ) -> None:
        self._config, self._timeouts = config, timeouts
        self._workers, self._states, self._server = workers, workers.states, server

    def train(self, command: MainTrain, *, is_due: IsDue = lambda: False) -> TrainingOutcome:
        """As `MainTraining.train`; all workers wait for the end of the last step."""
        stopwatch = Stopwatch()
        trained, attempts = None, count()
        while trained is None:  # until no shard dies in the phase
            command = replace(command, attempt=next(attempts))
            phase = epoch_phase(self._config, command)
            with stopwatch.measure("load_s"):
                command = self._begin(phase, command)  # its state may have been stored again
            start = self._states.get(command.state)
            with self._ended_when(is_due, phase.id):
                trained = self._train_phase(phase, command)
        parts, metrics, totals, staleness = trained
        with stopwatch.measure("average_s"):
            buffers = advance_buffers(start, [m.buffers for m in metrics], totals.steps)
            state_id = f"{phase.epoch}.{phase.steps.first + totals.steps}"
            state = self._states.put(state_id, assemble_state(start, parts, buffers))
        timings_s = slowest(m.timings_s for m in metrics)
        duration_s, data_wait_s = timings_s["compute_s"], timings_s["data_wait_s"]
        totals = replace(totals, duration_s=duration_s, data_wait_s=data_wait_s)
        timings_s |= stopwatch.timings_s
        return TrainingOutcome(state, totals, timings_s, len(metrics), staleness)

    def evaluate(self, state: StateRef, split: Split = "test") -> EvalTotals:
        """Evaluate on the split; when a worker dies, the others start again."""
        while True:
            workers = self._wait_for_workers()
            command = Evaluate(state, split, workers)
            replies: dict[int, EvalTotals] = self._workers.command(command, workers)
            if len(replies) == len(workers):
                return add_parts([replies[worker] for worker in workers])

    def _begin(self, phase: EpochPhase, command: MainTrain) -> MainTrain:
        self._wait([self._server.coordinator.begin.remote(phase)])
        while True:
            boxed_state = [command.state.ref]
            try:
                self._wait([s.load.remote(phase, boxed_state) for s in self._server.shards])
            except ray.exceptions.ObjectLostError:
                command = cast(MainTrain, self._states.renew(command))
            else:
                return command

    @contextmanager
    def _ended_when(self, is_due: IsDue, phase: str) -> Iterator[None]:
        """End the phase that is trained in the block as soon as `is_due`."""
        show = self._workers.on_wait

        def look(pool: str, progress: Progress | None) -> None:
            if show is not None:
                show(pool, progress)
            if is_due():
                self._server.coordinator.end_early.remote(phase)

        self._workers.on_wait = look
        try:
            yield
        finally:
            self._workers.on_wait = show

    def _train_phase(self, phase: EpochPhase, command: MainTrain) -> _Trained | None:
        """Repeat the command, for workers that come back, until it is done; None: a shard died."""
        while True:
            workers = self._wait_for_workers()
            replies: dict[int, AsyncWorkerMetrics] = self._workers.command(command, workers)
            [result] = self._wait([self._server.coordinator.result.remote()])
            parts = self._wait([s.collect.remote(phase.id) for s in self._server.shards])
            if result is None or None in parts:
                return None
            finished, totals, staleness = result
            if finished:
                metrics = [worker_metrics for _, worker_metrics in sorted(replies.items())]
                return parts, metrics, totals, staleness

    def _wait_for_workers(self) -> tuple[int, ...]:
        """Return the workers that are alive; wait for one when all have died."""
        start_s, limit_s = monotonic_s(), self._timeouts.start_s
        while not (workers := self._workers.alive()):
            self._workers.raise_if_ended()
            if monotonic_s() - start_s > limit_s:
                raise PoolError(f"no worker came back within {limit_s:g} s (timeouts.start_s)")
            time.sleep(_POLL_S)
        return workers

    def _wait(self, refs: Sequence[Any]) -> list[Any]:
        limit_s = self._timeouts.no_progress_s
        name = "the parameter server (limit: timeouts.no_progress_s)"
        return cast("list[Any]", answer(list(refs), name, limit_s))


def add_parts(parts: Sequence[EvalTotals]) -> EvalTotals:
    """Return the totals of all parts of a split."""
    return EvalTotals(
        samples=sum(part.samples for part in parts),
        sums={name: sum(part.sums[name] for part in parts) for name in parts[0].sums},
        duration_s=max(part.duration_s for part in parts),
        metric=parts[0].metric,
        predictions=Predictions.join([part.predictions for part in parts]),
        failure=next((part.failure for part in parts if part.failure), ""),
        loss_squares=sum(part.loss_squares for part in parts),
        skipped=sum(part.skipped for part in parts),
    )
