"""Typed access to the mailbox actor: one client for the driver, one for residents."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, cast

import ray
from ray import cloudpickle

from raytrain_opt.clock import monotonic_s
from raytrain_opt.errors import PoolError
from raytrain_opt.monitoring.process_usage import Usage
from raytrain_opt.pools.commands import (
    Close,
    Command,
    Failure,
    Instruction,
    Overdue,
    Progress,
    Reply,
    Report,
    Resident,
    StateLost,
    state_in,
)
from raytrain_opt.recording.spans import Event, Span

# What the mailbox answers at once takes milliseconds; minutes on a node that swaps.
_ANSWER_S = 300.0


class DriverMailbox:
    """The driver's view of one pool. Methods raise PoolError when the mailbox has died."""

    def __init__(self, actor: Any, pool: str) -> None:
        self.actor, self._pool = actor, pool
        self._posted = self._received = 0  # commands; spans and events

    def post(self, command: Command, expected: Sequence[int]) -> Any:
        """Post a command; return a reference to the replies, for `replies`."""
        self.answer(self._post(command))  # before anybody asks how long the pool has been silent
        return self.actor.collect.remote(self._pool, self._posted, expected)

    def replies(self, ref: Any) -> dict[int, Any]:
        """Wait for the replies to a command, by resident."""
        return {
            index: pickle.loads(value) if isinstance(value, bytes) else value
            for index, value in self.answer(ref).items()
        }

    def request_close(self) -> None:
        """Ask the residents to leave; does not wait."""
        self._post(Close())

    def stop_early(self) -> None:
        """Ask the residents to end the current command, a main training, before the same step."""
        self.answer(self.actor.stop_early.remote(self._pool, self._posted))

    def _post(self, command: Command) -> Any:
        self._posted += 1
        return self.actor.post.remote(self._pool, self._posted, command)

    def residents(self, count: int) -> Any:
        """Return a reference to the list of residents, complete when `count` have joined."""
        return self.actor.residents.remote(self._pool, count)

    def first_step(self) -> Any:
        """Return a reference that is ready when any pool has done a training step."""
        return self.actor.first_step.remote()

    def joined(self) -> list[Resident]:
        """Return the residents that have joined so far."""
        return cast("list[Resident]", self.answer(self.actor.joined.remote(self._pool)))

    def lose(self, index: int) -> None:
        """Give a resident up."""
        self.answer(self.actor.lose.remote(self._pool, index))

    def lost(self) -> list[int]:
        """Return the residents that were given up."""
        return cast("list[int]", self.answer(self.actor.lost.remote(self._pool)))

    def overdue(self, expected: Sequence[int]) -> list[Overdue]:
        """Return the residents that have not answered, the one furthest behind first."""
        ref = self.actor.overdue.remote(self._pool, expected)
        return cast("list[Overdue]", self.answer(ref))

    def silence_s(self) -> float:
        """Return the seconds since the last sign of life of the pool."""
        return cast(float, self.answer(self.actor.silence_s.remote(self._pool)))

    def progress(self) -> Progress | None:
        """Return the progress of the resident that is furthest behind."""
        return cast("Progress | None", self.answer(self.actor.progress.remote(self._pool)))

    def restarts(self) -> int:
        """Return how often a resident was restarted."""
        return cast(int, self.answer(self.actor.restarts.remote(self._pool)))

    def drain_log(self) -> tuple[float, list[Span], list[Event]]:
        """Return how far this process's clock is ahead of the mailbox's, the spans and events."""
        ref = self.actor.drain_log.remote(self._pool, self._received)
        mailbox_s, records = self.answer(ref)
        self._received += len(records)
        spans = [record for record in records if isinstance(record, Span)]
        events = [record for record in records if isinstance(record, Event)]
        return monotonic_s() - mailbox_s, spans, events

    @staticmethod
    def answer(ref: Any) -> Any:
        """Wait for an answer of the mailbox. Raises PoolError when it has died or is hung."""
        try:
            return ray.get(ref, timeout=_ANSWER_S)
        except ray.exceptions.GetTimeoutError as error:
            raise PoolError(
                f"the mailbox, the process through which driver, workers and slots talk, did not "
                f"answer within {_ANSWER_S:g} s (its node is overloaded or hung?)"
            ) from error
        except ray.exceptions.RayActorError as error:
            raise PoolError(
                "the mailbox, the process through which driver, workers and slots talk, has died "
                f"(killed, or its node went down?): {error}"
            ) from error


class ResidentMailbox:
    """A resident's view. Methods raise Ray's RayError when the mailbox has died.

    `relay`: what it calls for commands and progress, the mailbox itself in a small pool.
    """

    def __init__(self, actor: Any, relay: Any, resident: Resident) -> None:
        self._actor, self._relay, self._resident = actor, relay, resident

    def join(self) -> tuple[int, Command]:
        """Register as ready; wait for the current command and return it with its number."""
        ray.get(self._actor.join.remote(self._resident))
        return self._exchange(0, None)

    def reply(self, number: int, value: Any, usage: Usage) -> tuple[int, Command]:
        """Send the reply to a command; wait for the next one and return it with its number."""
        failed = isinstance(value, Failure | StateLost)
        if state_in(value) is None:
            value = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
        return self._exchange(number, Reply(self._resident.sender, number, value, failed, usage))

    def _exchange(self, after: int, reply: Reply | None) -> tuple[int, Command]:
        answer = ray.get(self._relay.exchange.remote(self._resident.pool, after, reply))
        return cast("tuple[int, Command]", answer)

    def report(
        self, number: int, progress: Progress | None, can_stop_before: int | None = None
    ) -> Instruction:
        """Send the progress in a command; return what this resident has to do."""
        report = Report(self._resident.sender, number, progress, can_stop_before)
        return cast(Instruction, ray.get(self._relay.report.remote(report)))

    def is_first(self, claim: str) -> bool:
        """Return True to the first resident with this claim."""
        return cast(bool, ray.get(self._actor.is_first.remote(claim)))


def share_data(actor: Any, data: object) -> None:
    """Store the in-memory data set once for all residents, and announce it to them."""
    DriverMailbox.answer(actor.share_data.remote([ray.put(data)]))


def fetch_shared_data(actor: Any) -> Any:
    """Return the data set, in memory shared with the node's other processes.

    Waits until the driver has read it.
    """
    [ref] = ray.get(actor.shared_data.remote())
    return ray.get(ref)


def report_lost(actor: Any, pool: str, index: int) -> None:
    """Tell the mailbox that this resident has died; return when it knows.

    A report that came later would give the restarted process up.
    """
    ray.get(actor.lose.remote(pool, index))
