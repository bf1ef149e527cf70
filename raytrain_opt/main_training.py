"""Main training and evaluation by all workers: together, or each by itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import ray

from raytrain_opt.clock import Parts, monotonic_s
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import PoolError
from raytrain_opt.pools.commands import (
    Evaluate,
    EvaluateReply,
    MainTrain,
    MainTrainReply,
    StateRef,
)
from raytrain_opt.pools.pool import Pool, Vault
from raytrain_opt.pools.shards import ServerHandles
from raytrain_opt.train.buffers import moved_on
from raytrain_opt.train.parameter_server import joined
from raytrain_opt.train.share_clock import Phase, phase_of
from raytrain_opt.train.state import HostState
from raytrain_opt.train.totals import EvalTotals, Report, TrainTotals

# How often is looked for a worker that has come back, when there is none left.
_POLL_S = 0.5


@dataclass(frozen=True)
class Trained:
    """What a main training came to. `loaded_sha256`: digests of what was loaded; `parts_s`:
    seconds of its slowest worker, by part; `workers`: how many there were at its end; `parallel`:
    how gradients travelled.
    """

    state: StateRef
    totals: TrainTotals
    loaded_sha256: tuple[str | None, ...]
    parts_s: dict[str, float]
    workers: int
    parallel: dict[str, object] = field(default_factory=dict)
    staleness: dict[str, object] | None = None


class MainTraining(Protocol):
    """How the workers do it."""

    def train(self, command: MainTrain, *, check: bool) -> Trained:
        """These steps, by all of them. `check`: digests of what was loaded are wanted."""
        ...

    def evaluate(self, state: StateRef) -> EvalTotals:
        """On the test split, each sample once."""
        ...


class Together:
    """All workers take each step together, as one process group."""

    def __init__(self, workers: Pool) -> None:
        self._workers = workers

    def train(self, command: MainTrain, *, check: bool) -> Trained:
        """See `MainTraining`."""
        by_rank: dict[int, MainTrainReply] = self._workers.command(command)
        replies = [reply for _, reply in sorted(by_rank.items())]
        trained = replies[0]
        assert trained.state is not None
        parts_s = {
            "compute_s": max(reply.totals.seconds for reply in replies),
            "data_wait_s": max(reply.totals.data_wait_s for reply in replies),
        }
        for name in ("load_s", "average_s", "hand_over_s"):
            parts_s[name] = max(reply.parts_s.get(name, 0.0) for reply in replies)
        return Trained(
            trained.state,
            trained.totals,
            tuple(reply.loaded_sha256 for reply in replies),
            parts_s,
            len(replies),
            trained.parallel,
        )

    def evaluate(self, state: StateRef) -> EvalTotals:
        """See `MainTraining`."""
        replies: dict[int, EvaluateReply] = self._workers.command(Evaluate(state))
        return replies[0].totals


class Apart:
    """Each worker by itself, against a parameter server. Those that die are done without; what
    the shards hold is put together in the driver.
    """

    def __init__(self, job: Job, workers: Pool, vault: Vault, server: ServerHandles) -> None:
        self._job, self._workers, self._vault = job, workers, vault
        self._server = server

    def train(self, command: MainTrain, *, check: bool) -> Trained:
        """See `MainTraining`."""
        parts = Parts()
        phase = phase_of(self._job, command.epoch, command.first_step, command.lrs, command.decay)
        with parts.measure("load_s"):
            command = self._begin(phase, command)
        start = self._vault.view(command.state)
        with ThreadPoolExecutor(1, "digest") as hasher:
            # Hashed while the training goes on.
            loaded = (
                [hasher.submit(joined(start, self._collect(0)[0], {}).digest)] if check else []
            )
            reports, (_, totals, staleness) = self._until_finished(command)
            with parts.measure("average_s"):
                shards, lost = self._collect(phase.updates)
                buffers = moved_on(start, [report.buffers for report in reports], phase.updates)
                state = self._vault.put(phase.id, joined(start, shards, buffers))
        compute_s = max((report.seconds for report in reports), default=0.0)
        data_wait_s = max((report.data_wait_s for report in reports), default=0.0)
        totals = replace(totals, steps=phase.updates, seconds=compute_s, data_wait_s=data_wait_s)
        waits = {name: max(r.parts_s.get(name, 0.0) for r in reports) for name in _waits(reports)}
        parts_s = {"compute_s": compute_s, "data_wait_s": data_wait_s, **parts.seconds, **waits}
        how: dict[str, object] = {
            "mode": "async",
            "workers": len(reports),
            "shares": [report.shares for report in reports],
            "shards": len(self._server.shards),
            "compression": self._job.parallel.compression,
            **lost,
        }
        digests = tuple(digest.result() for digest in loaded)
        return Trained(state, totals, digests, parts_s, len(reports), how, staleness.to_record())

    def evaluate(self, state: StateRef) -> EvalTotals:
        """See `MainTraining`. When a worker dies meanwhile, those that are left begin again."""
        while True:
            members = self._members()
            replies: dict[int, EvaluateReply] = self._workers.command(
                Evaluate(state, members), members
            )
            if len(replies) == len(members):
                return _added([reply.totals for reply in replies.values()])

    def _begin(self, phase: Phase, command: MainTrain) -> MainTrain:
        """The clock first, so that a shard that dies finds the phase when it comes back. Returns
        the command, with its state put into the store again where it was lost.
        """
        while True:
            boxed, shards = [command.state.ref], self._server.shards
            try:
                self._wait([self._server.clock.begin.remote(phase, shards, boxed)])
                self._wait([shard.load.remote(phase, boxed) for shard in shards])
            except ray.exceptions.ObjectLostError:
                command = cast(MainTrain, self._vault.renewed(command))
            else:
                return command

    def _until_finished(self, command: MainTrain) -> tuple[list[Report], Any]:
        """Workers that come back while there is work are told again."""
        while True:
            replies: dict[int, Report] = self._workers.command(command, self._members())
            [result] = self._wait([self._server.clock.result.remote()])
            if result[0]:
                return [report for _, report in sorted(replies.items())], result

    def _collect(self, version: int) -> tuple[list[HostState], dict[str, int]]:
        found = self._wait([shard.collect.remote(version) for shard in self._server.shards])
        lost = {
            "lost_gradients": sum(gradients for _, gradients, _ in found),
            "lost_updates": sum(updates for _, _, updates in found),
        }
        return [state for state, _, _ in found], lost

    def _members(self) -> tuple[int, ...]:
        """The workers that are there; waits for one where all have died."""
        began_s, limit_s = monotonic_s(), self._job.limits.start_s
        while not (members := self._workers.alive()):
            self._workers.raise_if_ended()
            if monotonic_s() - began_s > limit_s:
                raise PoolError(
                    f"no worker has come back for {limit_s:.0f} s (limits.start_s: {limit_s:g})"
                )
            time.sleep(_POLL_S)
        return members

    def _wait(self, answers: Sequence[Any]) -> list[Any]:
        """Raises PoolError when the server does not answer, or is no longer there."""
        limit_s = self._job.limits.stall_s
        try:
            found: list[Any] = ray.get(list(answers), timeout=limit_s)
            return found
        except ray.exceptions.GetTimeoutError as error:
            raise PoolError(
                f"the shards of the weights did not answer for {limit_s:g} s (limits.stall_s)"
            ) from error
        except ray.exceptions.RayActorError as error:
            raise PoolError(f"the parameter server has died: {error}") from error


def _waits(reports: Sequence[Report]) -> list[str]:
    return sorted({name for report in reports for name in report.parts_s})


def _added(parts: Sequence[EvalTotals]) -> EvalTotals:
    return EvalTotals(
        samples=sum(part.samples for part in parts),
        loss_sum=sum(part.loss_sum for part in parts),
        correct=sum(part.correct for part in parts),
        correct_top5=sum(part.correct_top5 for part in parts),
        seconds=max(part.seconds for part in parts),
    )
