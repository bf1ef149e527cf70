"""The mailbox: the actor through which the driver and the residents of both pools talk.

The driver posts a command to a pool and collects one reply per resident; residents wait for the
next command. A restarted resident joins again, gets the current command and repeats it from the
same state. Nothing here uses Ray, so the tests need none. Callers use `mailbox_client`.

Ray repeats a call whose connection was cut, and the first attempt may have been executed too:
every method has the same effect twice as once. Messages carry their sender; those of a process
that was replaced or given up are dropped.

Each pool has three parts: `Membership` (which residents have joined), `CommandBoard` (the current
command and its replies), `ActivityLog` (progress, signs of life, records).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from raytrain_opt.clock import monotonic_s
from raytrain_opt.monitoring.process_usage import Usage
from raytrain_opt.pools.commands import (
    Close,
    Command,
    Failure,
    Overdue,
    Progress,
    Resident,
    StateLost,
)
from raytrain_opt.recording.spans import Event, Span


@dataclass
class Membership:
    """The residents of one pool: which have joined, and which are lost."""

    residents: dict[int, Resident] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    restarts: int = 0

    def includes(self, resident: Resident) -> bool:
        """Whether this very process is a member, not one that it replaced, or that is lost."""
        return self.residents.get(resident.index) == resident and resident.index not in self.lost

    def join(self, resident: Resident) -> bool:
        """Add a resident. Returns whether it is a restarted one."""
        restarted = resident.index in self.residents
        self.restarts += restarted
        self.residents[resident.index] = resident
        self.lost.discard(resident.index)
        if resident.absent is not None:
            self.lost = set(resident.absent)
        return restarted

    def is_complete(self, count: int) -> bool:
        """Whether `count` residents have joined, or are lost."""
        return len(self.residents.keys() | self.lost) >= count

    def present(self) -> list[Resident]:
        """Return the residents that are not lost, by index."""
        return [r for index, r in sorted(self.residents.items()) if index not in self.lost]


@dataclass
class CommandBoard:
    """The current command of one pool, numbered from 1, and its replies by resident."""

    number: int = 0
    command: Command | None = None
    replies: dict[int, Any] = field(default_factory=dict)

    def post(self, number: int, command: Command) -> bool:
        """Make this the current command. Returns False if it was posted before."""
        if number <= self.number:
            return False
        self.number, self.command, self.replies = number, command, {}
        return True

    def is_answered(self, number: int, expected: set[int], lost: set[int]) -> bool:
        """Whether waiting for replies is over: all are here, one failed, or a new command came."""
        failed = any(isinstance(value, Failure | StateLost) for value in self.replies.values())
        return failed or expected <= self.replies.keys() | lost or self.number != number


@dataclass
class ActivityLog:
    """What the residents of one pool report: progress, signs of life, spans and events.

    Times are read from the clock of this process, so the clocks of the nodes need not agree.
    """

    progress: dict[int, Progress] = field(default_factory=dict)
    heard_s: dict[int, float] = field(default_factory=dict)
    posted_s: float = field(default_factory=monotonic_s)
    last_heard_s: float = field(default_factory=monotonic_s)
    has_trained: bool = False
    records: list[Span | Event] = field(default_factory=list)
    forgotten: int = 0  # records that the driver has received

    def begin_command(self) -> None:
        """Forget the progress of the command before."""
        self.progress, self.heard_s = {}, {}
        self.posted_s = self.last_heard_s = monotonic_s()

    def hear(self, index: int) -> None:
        """Record a sign of life."""
        self.last_heard_s = self.heard_s[index] = monotonic_s()

    def report(self, index: int, progress: Progress) -> bool:
        """Record progress. Returns whether it is the first training step of this pool.

        A report without any step since the last one is no sign of life: a hung process may send
        the same number again and again. One with fewer steps was overtaken by a later one: Ray
        does not keep the order of calls to this actor.
        """
        known = self.progress.get(index)
        if known is None or progress.done > known.done:
            self.hear(index)
            self.progress[index] = progress
        is_first = progress.done > 0 and not self.has_trained
        self.has_trained = self.has_trained or is_first
        return is_first

    def slowest(self) -> Progress | None:
        """Return the progress of the resident that is furthest behind."""
        reports = self.progress.values()
        return min(reports, key=lambda p: p.done / max(p.total, 1), default=None)

    def overdue(self, indices: Iterable[int]) -> list[Overdue]:
        """Describe the silence of these residents; the one furthest behind comes first."""
        now_s = monotonic_s()
        residents = (
            Overdue(i, self.progress.get(i), now_s - self.heard_s.get(i, self.posted_s))
            for i in indices
        )
        return sorted(residents, key=lambda o: (o.progress.done if o.progress else -1, o.index))

    def record_command(self, resident: str, command: str, usage: Usage) -> None:
        """Record a command that a resident has just finished."""
        start_s = monotonic_s() - usage.duration_s
        self.records.append(
            Span(
                process=resident,
                command=command,
                start_s=start_s,
                duration_s=usage.duration_s,
                timings_s=dict(usage.timings_s),
                utilization_pct=usage.utilization_pct,
                memory_mib=usage.memory_mib,
            )
        )

    def record_restart(self, resident: Resident, command: str) -> None:
        """Record a restart. It cost the time since the resident's last sign of life."""
        now_s = monotonic_s()
        silent_s = now_s - self.heard_s.get(resident.index, self.posted_s)
        self.progress.pop(resident.index, None)  # it begins the command anew
        text = f"{resident.name} was restarted during {command}"
        self.records.append(
            Event(
                kind="restarted",
                text=text,
                time_s=now_s,
                process=resident.name,
                silent_s=silent_s,
            )
        )

    def drain(self, received: int) -> list[Span | Event]:
        """Return the spans and events after the first `received`, which are forgotten."""
        del self.records[: received - self.forgotten]
        self.forgotten = received
        return list(self.records)


@dataclass
class _Books:
    membership: Membership = field(default_factory=Membership)
    board: CommandBoard = field(default_factory=CommandBoard)
    log: ActivityLog = field(default_factory=ActivityLog)

    @property
    def command_name(self) -> str:
        return "start-up" if self.board.command is None else self.board.command.name


class Mailbox:
    """Commands out, replies in. All methods are asynchronous, and none blocks another."""

    def __init__(self) -> None:
        self._books: dict[str, _Books] = {}
        self._shared_data: list[Any] | None = None
        self._claimed: set[str] = set()
        self._changed = asyncio.Condition()

    def _of(self, pool: str) -> _Books:
        return self._books.setdefault(pool, _Books())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # Called by residents.

    async def join(self, resident: Resident) -> None:
        """Register a resident that is ready for commands, for the first time or again."""
        books = self._of(resident.pool)
        if books.membership.includes(resident):
            return
        if books.membership.join(resident):
            books.log.record_restart(resident, books.command_name)
        books.log.hear(resident.index)
        # They may have answered before they died, with a state that died with them.
        for index in (resident.index, *(resident.absent or ())):
            books.board.replies.pop(index, None)
        await self._notify()

    async def next_command(self, pool: str, after: int) -> tuple[int, Command]:
        """Return the current command as soon as its number is above `after`."""
        board = self._of(pool).board
        async with self._changed:
            await self._changed.wait_for(lambda: board.number > after)
        assert board.command is not None
        return board.number, board.command

    async def closed(self, pool: str) -> bool:
        """Return when the pool is asked to close."""
        board = self._of(pool).board
        async with self._changed:
            await self._changed.wait_for(lambda: isinstance(board.command, Close))
        return True

    async def reply(
        self, sender: Resident, number: int, value: Any, usage: Usage | None = None
    ) -> None:
        """Take a resident's reply; a late one to an earlier command is dropped."""
        books, index = self._of(sender.pool), sender.index
        answered = number != books.board.number or index in books.board.replies
        if answered or not books.membership.includes(sender):
            return
        books.log.hear(index)
        if usage is not None:
            books.log.record_command(sender.name, books.command_name, usage)
        books.board.replies[index] = value
        await self._notify()

    async def report_progress(self, sender: Resident, number: int, progress: Progress) -> None:
        """Take a progress report, about one per second from each resident at work."""
        books = self._of(sender.pool)
        if number != books.board.number or not books.membership.includes(sender):
            return
        if books.log.report(sender.index, progress):
            await self._notify()

    async def is_first(self, claim: str) -> bool:
        """Return True to the first caller with this claim."""
        first = claim not in self._claimed
        self._claimed.add(claim)
        return first

    async def shared_data(self) -> list[Any]:
        """Return where the in-memory data set is, as soon as the driver has read it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._shared_data is not None)
        assert self._shared_data is not None
        return self._shared_data

    # Called by the driver.

    async def share_data(self, boxed_ref: list[Any]) -> None:
        """Announce the in-memory data set: a list of one reference.

        Ray would fetch a bare reference on the way here.
        """
        self._shared_data = boxed_ref
        await self._notify()

    async def residents(self, pool: str, count: int) -> list[Resident]:
        """Return the residents by index, without lost ones, once `count` have joined."""
        membership = self._of(pool).membership
        async with self._changed:
            await self._changed.wait_for(lambda: membership.is_complete(count))
        return membership.present()

    async def joined(self, pool: str) -> list[Resident]:
        """Return the residents that have joined so far."""
        return list(self._of(pool).membership.residents.values())

    async def lose(self, pool: str, index: int) -> None:
        """Give a resident up: nobody waits for it until it joins again."""
        self._of(pool).membership.lost.add(index)
        await self._notify()

    async def lost(self, pool: str) -> list[int]:
        """Return the residents that were given up."""
        return sorted(self._of(pool).membership.lost)

    async def restarts(self, pool: str) -> int:
        """Return how often a resident was restarted."""
        return self._of(pool).membership.restarts

    async def post(self, pool: str, number: int, command: Command) -> None:
        """Make `command` the current one. The driver numbers its commands from 1."""
        books = self._of(pool)
        if books.board.post(number, command):
            books.log.begin_command()
            await self._notify()

    async def collect(self, pool: str, number: int, expected: Iterable[int]) -> dict[int, Any]:
        """Return the replies by resident, when all expected ones have answered or one could not.

        Nobody waits for lost residents.
        """
        books, indices = self._of(pool), set(expected)
        async with self._changed:
            await self._changed.wait_for(
                lambda: books.board.is_answered(number, indices, books.membership.lost)
            )
        return dict(books.board.replies)

    async def overdue(self, pool: str, expected: Iterable[int]) -> list[Overdue]:
        """Return the residents that have not answered, the one furthest behind first."""
        books = self._of(pool)
        late = set(expected) - books.board.replies.keys() - books.membership.lost
        return books.log.overdue(late)

    async def silence_s(self, pool: str) -> float:
        """Return the seconds since the current command, or since the last sign of life."""
        return monotonic_s() - self._of(pool).log.last_heard_s

    async def progress(self, pool: str) -> Progress | None:
        """Return the progress of the resident that is furthest behind."""
        return self._of(pool).log.slowest()

    async def first_step(self) -> bool:
        """Return when a resident of any pool has done its first training step."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: any(books.log.has_trained for books in self._books.values())
            )
        return True

    async def drain_log(self, pool: str, received: int) -> tuple[float, list[Span | Event]]:
        """Return the time now, and spans and events after the first `received`, on this clock."""
        return monotonic_s(), self._of(pool).log.drain(received)
