"""A resident pool on Ray, from the driver's side: start it, post commands, collect replies."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import ray

from raytrain_opt.clock import monotonic_s
from raytrain_opt.cluster.actor_tree import wait_for_exit
from raytrain_opt.cluster.connection import answer, gone_nodes, raise_if_ray_ended
from raytrain_opt.cluster.ray_private import root_cause
from raytrain_opt.config.batch_size import BatchSizeSection
from raytrain_opt.config.schema import TimeoutsSection
from raytrain_opt.errors import PoolError, RaytrainOptError
from raytrain_opt.pools.commands import (
    Close,
    Command,
    Failure,
    Overdue,
    PoolStatus,
    ProbeBatchSize,
    Regroup,
    Resident,
    StateLost,
    state_in,
)
from raytrain_opt.pools.interface import OnWait
from raytrain_opt.pools.state_store import RayStateStore
from raytrain_opt.recording.records import Event
from raytrain_opt.results import Probe

# Escape sequences in texts of Ray.
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
# How often the driver looks for progress while it waits: often enough for a progress bar.
_POLL_S = 0.5


@dataclass
class RayPool:
    """One resident pool; implements `protocol.Pool`."""

    name: str
    size: int
    run: Callable[[], Any]  # starts it; the returned reference is ready when it has ended
    mailbox: Any  # handle of the Mailbox actor
    states: RayStateStore
    limit_s: float  # without progress, after which residents count as hung
    can_lose_residents: bool = False
    has_room: Callable[[], bool] | None = None  # for one more; None: the pool keeps its size
    on_wait: OnWait | None = None
    _ended: Any = None
    _ready: bool = False
    _posted: int = 0  # commands
    at_work: bool = False  # on a command, which it may never answer
    _received: int = 0  # events

    def start(self) -> None:
        if self._ended is None:
            self._ended = self.run()

    def wait_until_ready(self, limit_s: float) -> list[Resident]:
        """Return the residents when all have joined. Raises PoolError naming those missing."""
        ref = self.mailbox.residents.remote(self.name, self.size)
        start_s = monotonic_s()
        if not self._wait(ref, lambda _: monotonic_s() - start_s > limit_s):
            joined = {resident.index for resident in self._residents()}
            missing = sorted(set(range(self.size)) - joined)
            names = ", ".join(f"{self.name} {index}" for index in missing)
            raise PoolError(
                f"{names} did not start within {monotonic_s() - start_s:.0f} s "
                f"(timeouts.start_s: {limit_s:g})"
            )
        self._ready = True
        residents = cast("list[Resident]", answer(ref))
        if not residents:  # all were given up: the pool ends, and knows why
            self.wait_for_end(limit_s)
            self.raise_if_ended()
        return residents

    def alive(self) -> tuple[int, ...]:
        lost = self._status().lost
        return tuple(index for index in range(self.size) if index not in lost)

    def grow(self) -> None:
        """Let the residents join anew with the missing ones, if the cluster has room for any."""
        if self.has_room is not None and len(self.alive()) < self.size and self.has_room():
            self.command(Regroup())

    def command(self, command: Command, expected: Sequence[int] | None = None) -> dict[int, Any]:
        """As `Pool.command`; raises ResidentError, and PoolError also without progress."""
        indices = range(self.size) if expected is None else expected
        self.at_work = True
        # A state may be lost once with each resident or its node, with the driver's copy in
        # between, and once more on its way here. After more losses the command itself is at fault.
        for _ in range(self.size + 2):
            replies = self._post_and_collect(command, indices)
            for index, reply in replies.items():
                if isinstance(reply, Failure):
                    raise reply.to_error(f"{self.name} {index}")
            if self._pin_states(replies):
                self.at_work = False
                return {index: replies[index] for index in indices if index in replies}
            command = self.states.renew(command)
        raise PoolError(
            f"{self.name} pool: the state of {command.name} was lost {self.size + 2} times; "
            "nodes or processes keep dying (out of memory?), see Ray's session logs"
        )

    def _post_and_collect(self, command: Command, expected: Sequence[int]) -> dict[int, Any]:
        answer(self._post(command))  # before anybody asks how long the pool has been silent
        ref = self.mailbox.collect.remote(self.name, self._posted, expected)
        while not self._wait(ref, lambda status: status.silence_s > self.limit_s):
            overdue = answer(self.mailbox.overdue.remote(self.name, expected))
            if not self.can_lose_residents or len(overdue) == len(self.alive()):
                raise PoolError(self._explain_silence(command, overdue))
            for resident in overdue:  # the others continue without them
                answer(self.mailbox.lose.remote(self.name, resident.index))
        return {
            index: pickle.loads(value) if isinstance(value, bytes) else value
            for index, value in answer(ref).items()
        }

    def _post(self, command: Command) -> Any:
        self._posted += 1
        return self.mailbox.post.remote(self.name, self._posted, command)

    def _status(self) -> PoolStatus:
        return cast(PoolStatus, answer(self.mailbox.status.remote(self.name)))

    def _residents(self) -> list[Resident]:
        return cast("list[Resident]", answer(self.mailbox.residents.remote(self.name, 0)))

    def _pin_states(self, replies: Mapping[int, Any]) -> bool:
        """Hold the states in the replies; return False when one was lost, here or on its way."""
        if any(isinstance(reply, StateLost) for reply in replies.values()):
            return False
        try:
            for state in filter(None, map(state_in, replies.values())):
                self.states.pin(state)
        except ray.exceptions.ObjectLostError:
            return False
        return True

    def _wait(self, ref: Any, is_overdue: Callable[[PoolStatus], bool]) -> bool:
        """Wait for a reference; return False when it takes too long."""
        while not ray.wait([ref], timeout=_POLL_S)[0]:
            raise_if_ray_ended()
            self.raise_if_ended()
            status = self._status()
            if is_overdue(status):
                return False
            if self.on_wait is not None:
                self.on_wait(self.name, status.progress)
        return True

    def _explain_silence(self, command: Command, overdue: Sequence[Overdue]) -> str:
        residents, gone = {r.index: r for r in self._residents()}, gone_nodes()

        def describe(late: Overdue) -> str:
            name, progress = f"{self.name} {late.index}", late.progress
            if resident := residents.get(late.index):
                address = gone.get(resident.node_id)
                node = f"; its node {address} is gone, see workers.count" if address else ""
                name += f" (pid {resident.pid}, {resident.log}{node})"
            steps = "no step" if progress is None else f"{progress.done} of {progress.total} steps"
            return f"{name}: {steps}, silent for {late.silent_s:.0f} s"

        reports = "; ".join(map(describe, overdue))
        return (
            f"no progress of {command.name} for {self._status().silence_s:.0f} s "
            f"(timeouts.no_progress_s: {self.limit_s:g}). Without an answer, the one furthest "
            f"behind first: {reports}"
        )

    def raise_if_ended(self) -> None:
        """Raise the error of `why_ended` when the pool is no longer there."""
        if self._ended is None or not ray.wait([self._ended], timeout=0)[0]:
            return
        try:
            ray.get(self._ended, timeout=_POLL_S)
            raise why_ended(self.name, None)
        except RaytrainOptError:
            raise
        except Exception as error:  # whatever ended it is the cause we report
            raise why_ended(self.name, error) from error

    def new_events(self) -> list[Event]:
        mailbox_s, events = answer(self.mailbox.new_events.remote(self.name, self._received))
        self._received += len(events)
        ahead_s = monotonic_s() - mailbox_s
        return [e.model_copy(update={"time_s": e.time_s + ahead_s}) for e in events]

    def restarts(self) -> int:
        return self._status().restarts

    def request_close(self) -> None:
        """Ask the residents to leave; does not wait."""
        self._post(Close())

    def leave(self, limit_s: float) -> None:
        """Let the residents leave; `start` then starts new ones in their place."""
        answer(self._post(Regroup()))
        self.wait_for_end(limit_s)
        self._ended, self._ready = None, False

    def wait_for_end(self, limit_s: float) -> None:
        """Wait until the pool has ended, at most `limit_s`, and only if it was ever ready."""
        if self._ready and self._ended is not None:
            ray.wait([self._ended], timeout=limit_s)


@dataclass
class ProbingSlot:
    """A slot that measures batch sizes, started when needed."""

    pool: RayPool
    section: BatchSizeSection
    timeouts: TimeoutsSection
    _process: Resident | None = None

    def measure(self, batch_size: int, *, check: bool) -> Probe:
        """Measure a batch size; `check`: for longer, and with an evaluation.

        Raises what the training raised, PoolError without an answer.
        """
        if self._process is None:
            self.pool.start()
            [self._process] = self.pool.wait_until_ready(self.timeouts.start_s)
        if replies := self.pool.command(ProbeBatchSize(self.section, batch_size, check)):
            return replace(cast(Probe, replies[0]), pid=self._process.pid)
        try:
            self.pool.wait_for_end(self.timeouts.stop_s)
            self.pool.raise_if_ended()
            why = "it did not answer"
        except PoolError as error:
            why = str(error)
        self.end()
        return Probe(batch_size, "died", why=why)

    def end(self) -> None:
        """Let a new process measure the next size, when this one and its memory are gone."""
        if self._process is not None:
            self.pool.leave(self.timeouts.stop_s)
            wait_for_exit(self._process.node_id, self._process.pid)
            self._process = None


def why_ended(pool: str, error: Exception | None) -> RaytrainOptError:
    """Return the error of a pool that ended too early, from what Ray raised for it.

    An error of this package that a resident raised is returned itself. Only where no exception is
    known, the text guesses why processes have died.
    """
    rank, cause = (None, None) if error is None else root_cause(error)
    resident = pool if rank is None else f"{pool} {rank}"
    if isinstance(cause, RaytrainOptError):
        return cause
    text = _COLORS.sub("", f"{type(cause).__name__}: {cause}")
    if isinstance(cause, ModuleNotFoundError):
        return PoolError(
            f"{resident}: {text}. It can be imported here, but not on that node: install it "
            "there, or add its folder to PYTHONPATH before Ray is started"
        )
    if cause is not None and not type(cause).__module__.startswith("ray."):
        return PoolError(f"{resident} raised {text}")
    return PoolError(
        f"the {pool} pool ended before the training did{f': {text}' if cause else ''}. Processes "
        "of it may have been killed (out of memory?); see Ray's session logs. max_restarts sets "
        "how often they are restarted."
    )
