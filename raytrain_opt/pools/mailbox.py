"""The mailbox: the one place where driver and pools meet.

The driver posts a command to a pool and collects one reply per member; members wait for the
next command. A member that was started again joins anew, gets the present command and does
it again from the same state. The class holds no Ray, so its tests need none.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from raytrain_opt.clock import monotonic_s
from raytrain_opt.pools.commands import (
    Close,
    Command,
    Failure,
    Member,
    Missing,
    Progress,
    StateLost,
)
from raytrain_opt.telemetry.timeline import Event, Span
from raytrain_opt.telemetry.usage import Usage


@dataclass
class _Pool:
    members: dict[int, Member] = field(default_factory=dict)
    command_id: int = 0
    command: Command | None = None
    replies: dict[int, Any] = field(default_factory=dict)
    progress: dict[int, Progress] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    heard_s: dict[int, float] = field(default_factory=dict)
    posted_s: float = field(default_factory=monotonic_s)
    moved_s: float = field(default_factory=monotonic_s)
    restarts: int = 0
    first_step: bool = False
    spans: list[Span] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def sign_of_life(self, index: int) -> None:
        """Something came from this member, and so did the pool's work go on."""
        self.moved_s = self.heard_s[index] = monotonic_s()

    def note_restart(self, member: Member) -> None:
        """What it cost is the time since the member was heard of last."""
        now_s = monotonic_s()
        silent_s = now_s - self.heard_s.get(member.index, self.posted_s)
        text = f"{member.name} was started again, during {_doing(self.command)}"
        self.events.append(Event("restarted", text, now_s, member.name, silent_s))


class Mailbox:
    """Commands out, replies in. All methods are asynchronous and none blocks the others."""

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}
        self._shared_data: list[Any] | None = None
        self._seen: set[str] = set()
        self._changed = asyncio.Condition()

    def _pool(self, pool: str) -> _Pool:
        return self._pools.setdefault(pool, _Pool())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def join(self, member: Member) -> None:
        """A member is ready for commands (again, when it was started again)."""
        pool = self._pool(member.pool)
        if member.index in pool.members:
            pool.restarts += 1
            pool.note_restart(member)
        pool.members[member.index] = member
        pool.lost.discard(member.index)
        if member.absent is not None:
            pool.lost = set(member.absent)
        pool.sign_of_life(member.index)
        # It answered before it died, perhaps; what it answered with may be gone.
        pool.replies.pop(member.index, None)
        await self._notify()

    async def members(self, pool: str, count: int) -> list[Member]:
        """All members, once there are `count` of them, without those that are lost; in the order
        of their numbers.
        """
        at = self._pool(pool)
        async with self._changed:
            await self._changed.wait_for(lambda: len(at.members.keys() | at.lost) >= count)
        return [member for index, member in sorted(at.members.items()) if index not in at.lost]

    async def lose(self, pool: str, index: int) -> None:
        """This member will not be started again."""
        self._pool(pool).lost.add(index)
        await self._notify()

    async def lost(self, pool: str) -> list[int]:
        """Who will not be started again."""
        return sorted(self._pool(pool).lost)

    async def joined(self, pool: str) -> list[Member]:
        """Those that have joined so far."""
        return list(self._pool(pool).members.values())

    async def post(self, pool: str, command: Command) -> int:
        """Make `command` the present one; returns its number, for `collect`."""
        at = self._pool(pool)
        at.command_id += 1
        at.command, at.replies, at.progress, at.heard_s = command, {}, {}, {}
        at.posted_s = at.moved_s = monotonic_s()
        await self._notify()
        return at.command_id

    async def next_command(self, pool: str, after: int) -> tuple[int, Command]:
        """The present command, as soon as its number is above `after`."""
        at = self._pool(pool)
        async with self._changed:
            await self._changed.wait_for(lambda: at.command_id > after)
        assert at.command is not None
        return at.command_id, at.command

    async def closed(self, pool: str) -> bool:
        """Returns when the pool is told to close."""
        async with self._changed:
            await self._changed.wait_for(lambda: isinstance(self._pool(pool).command, Close))
        return True

    async def reply(
        self, pool: str, index: int, command_id: int, value: Any, usage: Usage | None = None
    ) -> None:
        """A member's answer; one to a command that is no longer present is dropped."""
        at = self._pool(pool)
        if command_id == at.command_id:
            at.sign_of_life(index)
            if usage is not None:
                at.spans.append(_span(f"{pool} {index}", _doing(at.command), usage))
            at.replies[index] = value
            await self._notify()

    async def collect(self, pool: str, command_id: int, expected: Iterable[int]) -> dict[int, Any]:
        """Replies by member, when all expected but the lost ones have answered, or one could
        not.
        """
        at, wanted = self._pool(pool), set(expected)

        def complete() -> bool:
            failed = any(isinstance(value, Failure | StateLost) for value in at.replies.values())
            return failed or wanted <= at.replies.keys() | at.lost or at.command_id != command_id

        async with self._changed:
            await self._changed.wait_for(complete)
        return dict(at.replies)

    async def missing(self, pool: str, expected: Iterable[int]) -> list[Missing]:
        """Who has not answered the present command; the one furthest behind first."""
        at, now_s = self._pool(pool), monotonic_s()
        silent = (
            Missing(index, at.progress.get(index), now_s - at.heard_s.get(index, at.posted_s))
            for index in set(expected) - at.replies.keys() - at.lost
        )
        return sorted(silent, key=lambda m: (m.progress.done if m.progress else -1, m.index))

    async def silence_s(self, pool: str) -> float:
        """Seconds since the present command came, or anything from a member after it."""
        return monotonic_s() - self._pool(pool).moved_s

    async def is_first(self, what: str) -> bool:
        """True for the first one to ask."""
        first = what not in self._seen
        self._seen.add(what)
        return first

    async def report_progress(self, pool: str, index: int, progress: Progress) -> None:
        """Called about once a second by a member at work."""
        at = self._pool(pool)
        if progress != at.progress.get(index):
            at.sign_of_life(index)
        at.progress[index] = progress
        if progress.done > 0 and not at.first_step:
            at.first_step = True
            await self._notify()

    async def first_step(self) -> bool:
        """Returns when any member has done its first training step."""
        async with self._changed:
            await self._changed.wait_for(lambda: any(p.first_step for p in self._pools.values()))
        return True

    async def progress(self, pool: str) -> Progress | None:
        """That of the member which is furthest behind."""
        reports = self._pool(pool).progress.values()
        return min(reports, key=lambda p: p.done / max(p.total, 1), default=None)

    async def share_data(self, boxed_ref: list[Any]) -> None:
        """Where the in-memory data set is: a list of one reference (a bare one would be
        fetched on the way here).
        """
        self._shared_data = boxed_ref
        await self._notify()

    async def shared_data(self) -> list[Any]:
        """The same, as soon as the driver has read the data."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._shared_data is not None)
        assert self._shared_data is not None
        return self._shared_data

    async def take_log(self, pool: str) -> tuple[float, list[Span], list[Event]]:
        """What the members did and met since the last call, and the time now; both on this
        process's clock, so that those of the nodes need not agree.
        """
        at = self._pool(pool)
        spans, events = at.spans, at.events
        at.spans, at.events = [], []
        return monotonic_s(), spans, events

    async def restarts(self, pool: str) -> int:
        """How often a member was started again."""
        return self._pool(pool).restarts


def _span(who: str, doing: str, usage: Usage) -> Span:
    """It ends now."""
    began_s = monotonic_s() - usage.seconds
    return Span(
        who,
        doing,
        began_s,
        usage.seconds,
        usage.parts_s,
        usage.utilization_pct,
        usage.memory_mib,
    )


def _doing(command: Command | None) -> str:
    """main_train of MainTrain."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(command).__name__).lower()
