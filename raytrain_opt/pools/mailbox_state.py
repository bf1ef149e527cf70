"""What the mailbox knows of a pool; a message costs the same in one of any size."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from raytrain_opt.clock import monotonic_s
from raytrain_opt.pools.commands import (
    Close,
    Command,
    CommandTime,
    Instruction,
    Overdue,
    Progress,
    Resident,
    Sender,
)
from raytrain_opt.recording.spans import Event, Span

# Residents of a pool of which every command is recorded. Of the others, only the one that took
# longest: the records of a run must not grow with its workers.
RECORDED_RESIDENTS = 16


class Signal:
    """Wakes the coroutines that wait for one kind of change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Let all who wait look again."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return as soon as the condition holds; it is looked at after each notification."""
        while not condition():
            await self._event.wait()


@dataclass
class Membership:
    """The residents of one pool: which have joined, and which are lost."""

    residents: dict[int, Resident] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    restarts: int = 0
    changed: Signal = field(default_factory=Signal)

    def includes(self, sender: Sender) -> bool:
        """Whether this very process is a member, not one that it replaced, or that is lost."""
        resident = self.residents.get(sender[1])
        return resident is not None and resident.sender == sender and sender[1] not in self.lost

    def join(self, resident: Resident) -> bool:
        """Add a resident. Returns whether it is a restarted one."""
        restarted = resident.index in self.residents
        self.restarts += restarted
        self.residents[resident.index] = resident
        self.lost.discard(resident.index)
        return restarted

    def is_complete(self, count: int) -> bool:
        """Whether `count` residents have joined, or are lost."""
        return len(self.residents) + len(self.lost - self.residents.keys()) >= count

    def present(self) -> list[Resident]:
        """Return the residents that are not lost, by index."""
        return [r for index, r in sorted(self.residents.items()) if index not in self.lost]


@dataclass
class CommandBoard:
    """The current command of one pool, numbered from 1, and its replies by resident."""

    number: int = 0
    command: Command | None = None
    collected: bool = False  # the driver has the replies, so nobody repeats the command
    replies: dict[int, Any] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)  # who could not execute it
    stopping: bool = False  # before its last step
    handing_over: set[Sender] = field(default_factory=set)  # after the death of another
    posted: Signal = field(default_factory=Signal)
    replied: Signal = field(default_factory=Signal)

    def post(self, number: int, command: Command) -> bool:
        """Make this the current command. Returns False if it was posted before."""
        if number <= self.number:
            return False
        self.number, self.command, self.replies, self.failed = number, command, {}, set()
        self.collected, self.stopping = False, False
        self.handing_over.clear()
        self.posted.notify()
        self.replied.notify()
        return True

    def remove_reply(self, index: int) -> None:
        """Expect another reply of this resident."""
        self.replies.pop(index, None)
        self.failed.discard(index)

    def instruction(self) -> Instruction:
        """Return what those at work have to do."""
        closed = isinstance(self.command, Close)
        return Instruction(closed, self.number if self.stopping else 0)

    async def next_command(self, after: int) -> tuple[int, Command]:
        """Return the current command as soon as its number is above `after`."""
        await self.posted.wait_for(lambda: self.number > after)
        assert self.command is not None
        return self.number, self.command

    def is_answered(self, number: int, expected: Sequence[int], lost: set[int]) -> bool:
        """Whether waiting for replies is over: all are here, one failed, or a new command came."""
        if self.failed or self.number != number:
            return True
        # The first condition spares a look at each of them after every reply.
        return len(self.replies) + len(lost) >= len(expected) and all(
            index in self.replies or index in lost for index in expected
        )


@dataclass
class ActivityLog:
    """What a pool's residents report: progress, spans, events; on the clock of this process."""

    progress: dict[int, Progress] = field(default_factory=dict)
    heard_s: dict[int, float] = field(default_factory=dict)
    posted_s: float = field(default_factory=monotonic_s)
    last_heard_s: float = field(default_factory=monotonic_s)
    has_trained: bool = False
    records: list[Span | Event] = field(default_factory=list)
    longest: Span | None = None  # of the current command, by those not all of whose are recorded
    forgotten: int = 0  # records that the driver has received

    def begin_command(self) -> None:
        """Forget the progress of the command before."""
        self.end_command()
        self.progress, self.heard_s = {}, {}
        self.posted_s = self.last_heard_s = monotonic_s()

    def hear(self, index: int) -> None:
        """Record a sign of life."""
        self.last_heard_s = self.heard_s[index] = monotonic_s()

    def report(self, index: int, progress: Progress) -> None:
        """Record progress.

        A report without any step since the last one is no sign of life: a hung process may send
        the same number again and again. One with fewer steps was overtaken by a later one: Ray
        does not keep the order of calls to this actor.
        """
        known = self.progress.get(index)
        if known is None or progress.done > known.done:
            self.hear(index)
            self.progress[index] = progress
        self.has_trained = self.has_trained or progress.done > 0

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

    def record_command(self, sender: Sender, command: str, time: CommandTime) -> None:
        """Record a command that a resident has just finished."""
        pool, index, *_ = sender
        recorded = index < RECORDED_RESIDENTS
        if not recorded and self.longest and time.duration_s <= self.longest.duration_s:
            return
        span = Span(
            process=f"{pool} {index}",
            command=command,
            start_s=monotonic_s() - time.duration_s,
            **asdict(time),
        )
        if recorded:
            self.records.append(span)
        else:
            self.longest = span

    def end_command(self) -> None:
        """Record who took longest, of those not all of whose commands are recorded."""
        if self.longest is not None:
            self.records.append(self.longest)
            self.longest = None

    def record_restart(self, resident: Resident, command: str) -> None:
        """Record a restart. It cost the time since the resident's last sign of life."""
        now_s = monotonic_s()
        silent_s = now_s - self.heard_s.get(resident.index, self.posted_s)
        self.progress.pop(resident.index, None)  # it begins the command anew
        text = f"{resident.name} was restarted during {command}"
        self.records.append(
            Event(
                kind="restarted", text=text, time_s=now_s, process=resident.name, silent_s=silent_s
            )
        )

    def silence_s(self) -> float:
        """Return the seconds since the current command, or since the last sign of life."""
        return monotonic_s() - self.last_heard_s

    def drain(self, received: int) -> tuple[float, list[Span | Event]]:
        """Return the time now, and the records after the first `received`, which are forgotten."""
        del self.records[: received - self.forgotten]
        self.forgotten = received
        return monotonic_s(), list(self.records)


@dataclass
class PoolState:
    """Everything about one pool."""

    membership: Membership = field(default_factory=Membership)
    board: CommandBoard = field(default_factory=CommandBoard)
    log: ActivityLog = field(default_factory=ActivityLog)

    @property
    def command_name(self) -> str:
        """Name of the current command."""
        return "start-up" if self.board.command is None else self.board.command.name
