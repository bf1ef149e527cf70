"""Typed access to the mailbox actor: one client for the driver, one for residents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import ray

from raytrain_opt.clock import monotonic_s
from raytrain_opt.errors import PoolError
from raytrain_opt.monitoring.process_usage import Usage
from raytrain_opt.pools.commands import Close, Command, Overdue, Progress, Resident
from raytrain_opt.recording.spans import Event, Span


class DriverMailbox:
    """The driver's view of one pool. Methods raise PoolError when the mailbox has died."""

    def __init__(self, actor: Any, pool: str) -> None:
        self.actor, self._pool = actor, pool
        self._posted = self._received = 0  # commands; spans and events

    def post(self, command: Command) -> int:
        """Post a command; return its number."""
        self.answer(self._post(command))
        return self._posted

    def request_close(self) -> None:
        """Ask the residents to leave; does not wait."""
        self._post(Close())

    def _post(self, command: Command) -> Any:
        self._posted += 1
        return self.actor.post.remote(self._pool, self._posted, command)

    def collect(self, number: int, expected: Sequence[int]) -> Any:
        """Return a reference to the replies by resident, a dict."""
        return self.actor.collect.remote(self._pool, number, expected)

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
        """Wait for an answer of the mailbox. Raises PoolError when it has died."""
        try:
            return ray.get(ref)
        except ray.exceptions.RayActorError as error:
            raise PoolError(
                "the mailbox, the process through which driver, workers and slots talk, has died "
                f"(killed, or its node went down?): {error}"
            ) from error


class ResidentMailbox:
    """A resident's view. Methods raise Ray's RayError when the mailbox has died."""

    def __init__(self, actor: Any, resident: Resident) -> None:
        self._actor, self._pool, self._resident = actor, resident.pool, resident

    def join(self) -> None:
        """Register as ready for commands."""
        ray.get(self._actor.join.remote(self._resident))

    def next_command(self, after: int) -> tuple[int, Command]:
        """Wait for a command with a number above `after`; return its number and the command."""
        answer = ray.get(self._actor.next_command.remote(self._pool, after))
        return cast("tuple[int, Command]", answer)

    def wait_until_closed(self) -> None:
        """Wait until the pool is asked to close."""
        ray.get(self._actor.closed.remote(self._pool))

    def reply(self, number: int, value: Any, usage: Usage) -> None:
        """Send the reply to a command; return when it has arrived."""
        ray.get(self._actor.reply.remote(self._resident, number, value, usage))

    def report_progress(self, number: int, progress: Progress) -> None:
        """Send a progress report about a command; does not wait."""
        self._actor.report_progress.remote(self._resident, number, progress)

    def is_first(self, claim: str) -> bool:
        """Return True to the first resident with this claim."""
        return cast(bool, ray.get(self._actor.is_first.remote(claim)))


def share_data(actor: Any, data: object) -> None:
    """Store the in-memory data set once for all residents, and announce it to them."""
    ray.get(actor.share_data.remote([ray.put(data)]))


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
