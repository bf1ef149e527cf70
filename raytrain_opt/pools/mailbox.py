"""The mailbox: the actor through which the driver and the residents of both pools talk.

The driver posts a command to a pool and collects one reply per resident. A resident makes one call
per command: it brings the reply to the last command and returns with the next one. A restarted
resident joins again, gets the current command and repeats it from the same state, or waits for the
next one when the driver has the replies. Nothing here uses Ray.

Ray repeats a call whose connection was cut, and the first attempt may have been executed too:
every method has the same effect twice as once. Messages of a process that was replaced or given up
are dropped.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from raytrain_opt.clock import monotonic_s
from raytrain_opt.pools.commands import (
    Close,
    Command,
    Message,
    Overdue,
    PoolStatus,
    Progress,
    Regroup,
    Resident,
)
from raytrain_opt.recording.records import Event


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
class PoolState:
    """Everything about one pool, on the clock of this process."""

    residents: dict[int, Resident] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    restarts: int = 0
    # The current command, numbered from 1, and its replies by resident.
    number: int = 0
    command: Command | None = None
    collected: bool = False  # the driver has the replies, so nobody repeats the command
    replies: dict[int, Any] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)  # who could not execute it
    progress: dict[int, Progress] = field(default_factory=dict)
    heard_s: dict[int, float] = field(default_factory=dict)
    posted_s: float = field(default_factory=monotonic_s)
    last_heard_s: float = field(default_factory=monotonic_s)
    events: list[Event] = field(default_factory=list)
    posted: Signal = field(default_factory=Signal)  # for residents
    changed: Signal = field(default_factory=Signal)  # for the driver

    def includes(self, sender: Resident) -> bool:
        """Whether this very process is a member, not one that it replaced, or that is lost."""
        return self.residents.get(sender.index) == sender and sender.index not in self.lost

    def join(self, resident: Resident) -> None:
        """Add a resident; record a restart."""
        if resident.index in self.residents:
            self._record_restart(resident)
        self.residents[resident.index] = resident
        self.lost.discard(resident.index)
        self.hear(resident.index)

    def _record_restart(self, resident: Resident) -> None:
        """Record a restart. It cost the time since the resident's last sign of life."""
        self.restarts += 1
        self.progress.pop(resident.index, None)  # it begins the command anew
        now_s, name = monotonic_s(), resident.name
        silent_s = now_s - self.heard_s.get(resident.index, self.posted_s)
        command = "start-up" if self.command is None else self.command.name
        text = f"{name} was restarted during {command}"
        event = Event(kind="restarted", text=text, time_s=now_s, process=name, silent_s=silent_s)
        self.events.append(event)

    def hear(self, index: int) -> None:
        self.last_heard_s = self.heard_s[index] = monotonic_s()

    def post(self, number: int, command: Command) -> None:
        """Make this the current command, unless it was posted before."""
        if number <= self.number:
            return
        self.number, self.command, self.collected = number, command, False
        self.replies, self.failed, self.progress, self.heard_s = {}, set(), {}, {}
        self.posted_s = self.last_heard_s = monotonic_s()
        if isinstance(command, Regroup):  # who joins now was not restarted by a death
            self.residents.clear()
            self.lost.clear()
        self.posted.notify()
        self.changed.notify()

    def take_reply(self, reply: Message) -> None:
        """Keep the first reply of a resident."""
        if (index := reply.sender.index) in self.replies:
            return
        self.hear(index)
        self.replies[index] = reply.value
        if reply.failed:
            self.failed.add(index)

    def take_progress(self, index: int, progress: Progress) -> None:
        """Record steps; without new ones it is no sign of life, or a later one overtook it."""
        if (known := self.progress.get(index)) is None or progress.done > known.done:
            self.hear(index)
            self.progress[index] = progress

    def is_answered(self, number: int, expected: Sequence[int]) -> bool:
        """Whether waiting for replies is over: all are here, one failed, or a new command came."""
        if self.failed or self.number != number:
            return True
        return all(index in self.replies or index in self.lost for index in expected)


class Mailbox:
    """Commands out, replies in; `shared`: a list of the reference to what residents share."""

    def __init__(self, shared: list[Any] | None = None) -> None:
        self._pools: dict[str, PoolState] = defaultdict(PoolState)
        self._shared = shared

    # Called by residents.

    async def join(
        self, residents: Sequence[Resident], absent: Sequence[int] = ()
    ) -> tuple[int, bool]:
        """Register residents that are ready for commands, for the first time or again.

        `absent`: ranks that their process group does without. Returns the number of the current
        command, and whether it is over.
        """
        state = self._pools[residents[0].pool]
        if new := [resident for resident in residents if not state.includes(resident)]:
            for resident in new:
                state.join(resident)
            state.lost |= set(absent)
            # They may have answered before they died, with a state that died with them.
            if not state.collected:
                for index in (*(resident.index for resident in new), *absent):
                    state.replies.pop(index, None)
                    state.failed.discard(index)
            state.changed.notify()
        return state.number, state.collected

    async def exchange(
        self, pool: str, after: int, replies: Sequence[Message]
    ) -> tuple[int, Command]:
        """Take replies, return the next command: the one call of a resident for each command."""
        await self.receive(replies)
        state = self._pools[pool]
        await state.posted.wait_for(lambda: state.number > after)
        assert state.command is not None
        return state.number, state.command

    async def receive(self, messages: Sequence[Message]) -> None:
        """Take messages of residents; drop late ones about an earlier command."""
        for message in messages:
            state = self._pools[message.sender.pool]
            if message.number != state.number or not state.includes(message.sender):
                continue
            if isinstance(message.value, Progress):
                state.take_progress(message.sender.index, message.value)
            else:
                state.take_reply(message)
            state.changed.notify()

    async def is_closed(self, pool: str) -> bool:
        return isinstance(self._pools[pool].command, Close)

    async def shared(self) -> list[Any] | None:
        """Return the reference to what residents share, in a list."""
        return self._shared

    # Called by the driver.

    async def residents(self, pool: str, count: int) -> list[Resident]:
        """Return the residents by index, without lost ones, once `count` have joined."""
        state = self._pools[pool]
        await state.changed.wait_for(lambda: len(state.residents.keys() | state.lost) >= count)
        return [r for index, r in sorted(state.residents.items()) if index not in state.lost]

    async def lose(self, pool: str, index: int) -> None:
        """Give a resident up: nobody waits for it until it joins again."""
        state = self._pools[pool]
        state.lost.add(index)
        state.changed.notify()

    async def status(self, pool: str) -> PoolStatus:
        """Return what the driver looks at while it waits."""
        state = self._pools[pool]
        progress = state.progress.values()
        return PoolStatus(
            frozenset(state.lost),
            state.restarts,
            monotonic_s() - state.last_heard_s,
            min(progress, key=lambda p: p.done / max(p.total, 1), default=None),
        )

    async def post(self, pool: str, number: int, command: Command) -> None:
        """Make `command` the current one. The driver numbers its commands from 1."""
        self._pools[pool].post(number, command)

    async def collect(self, pool: str, number: int, expected: Sequence[int]) -> dict[int, Any]:
        """Return the replies, when all expected but lost residents answered or one could not."""
        state = self._pools[pool]
        await state.changed.wait_for(lambda: state.is_answered(number, expected))
        if state.number == number:
            state.collected = True
        return dict(state.replies)

    async def overdue(self, pool: str, expected: Iterable[int]) -> list[Overdue]:
        """Return the residents that have not answered, the one furthest behind first."""
        state, now_s = self._pools[pool], monotonic_s()
        late = [
            Overdue(i, state.progress.get(i), now_s - state.heard_s.get(i, state.posted_s))
            for i in set(expected) - state.replies.keys() - state.lost
        ]
        return sorted(late, key=lambda o: (o.progress.done if o.progress else -1, o.index))

    async def new_events(self, pool: str, received: int) -> tuple[float, list[Event]]:
        """Return the time now, and the events after the first `received`, on this clock."""
        return monotonic_s(), self._pools[pool].events[received:]
