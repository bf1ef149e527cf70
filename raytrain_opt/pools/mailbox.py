"""The mailbox: the actor through which the driver and the residents of both pools talk.

The driver posts a command to a pool and collects one reply per resident. A resident makes one call
per command: it brings the reply to the last command and returns with the next one. For workers
that form a process group, the first rank does so for all of them (`resident`). A restarted
resident joins again, gets the current command and repeats it from the same state, or waits for the
next one when the driver has the replies. Nothing here uses Ray, so the tests need none. Callers
use `resident.ResidentMailbox`, or Ray.

Ray repeats a call whose connection was cut, and the first attempt may have been executed too:
every method has the same effect twice as once. Messages carry their sender; those of a process
that was replaced or given up are dropped.

`PoolState` is what it knows of a pool; a message costs the same in a pool of any size.
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
    Overdue,
    PoolStatus,
    Progress,
    Regroup,
    Reply,
    Report,
    Resident,
    Sender,
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
    posted: Signal = field(default_factory=Signal)
    replied: Signal = field(default_factory=Signal)

    def post(self, number: int, command: Command) -> bool:
        """Make this the current command. Returns False if it was posted before."""
        if number <= self.number:
            return False
        self.number, self.command, self.replies, self.failed = number, command, {}, set()
        self.collected = False
        self.posted.notify()
        self.replied.notify()
        return True

    def remove_reply(self, index: int) -> None:
        """Expect another reply of this resident."""
        self.replies.pop(index, None)
        self.failed.discard(index)

    async def next_command(self, after: int) -> tuple[int, Command]:
        """Return the current command as soon as its number is above `after`."""
        await self.posted.wait_for(lambda: self.number > after)
        assert self.command is not None
        return self.number, self.command

    def is_answered(self, number: int, expected: Sequence[int], lost: set[int]) -> bool:
        """Whether waiting for replies is over: all are here, one failed, or a new command came."""
        if self.failed or self.number != number:
            return True
        return all(index in self.replies or index in lost for index in expected)


@dataclass
class ActivityLog:
    """What a pool's residents report: progress, spans, events; on the clock of this process."""

    progress: dict[int, Progress] = field(default_factory=dict)
    heard_s: dict[int, float] = field(default_factory=dict)
    posted_s: float = field(default_factory=monotonic_s)
    last_heard_s: float = field(default_factory=monotonic_s)
    events: list[Event] = field(default_factory=list)

    def begin_command(self) -> None:
        """Forget the progress of the command before."""
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

    def record_restart(self, resident: Resident, command: str) -> None:
        """Record a restart. It cost the time since the resident's last sign of life."""
        now_s = monotonic_s()
        silent_s = now_s - self.heard_s.get(resident.index, self.posted_s)
        self.progress.pop(resident.index, None)  # it begins the command anew
        text = f"{resident.name} was restarted during {command}"
        self.events.append(
            Event(
                kind="restarted", text=text, time_s=now_s, process=resident.name, silent_s=silent_s
            )
        )

    def silence_s(self) -> float:
        """Return the seconds since the current command, or since the last sign of life."""
        return monotonic_s() - self.last_heard_s

    def new_events(self, received: int) -> tuple[float, list[Event]]:
        """Return the time now, and the events after the first `received`."""
        return monotonic_s(), self.events[received:]


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


class Mailbox:
    """Commands out, replies in. All methods are asynchronous, and none blocks another.

    `shared`: a list of the reference to what residents share. Ray would fetch a bare one.
    """

    def __init__(self, shared: list[Any] | None = None) -> None:
        self._pools: dict[str, PoolState] = defaultdict(PoolState)
        self._shared = shared

    def _board(self, pool: str) -> CommandBoard:
        return self._pools[pool].board

    # Called by residents.

    async def join(
        self, residents: Sequence[Resident], absent: Sequence[int] = ()
    ) -> tuple[int, bool]:
        """Register residents that are ready for commands, for the first time or again.

        `absent`: ranks that their process group does without. Returns the number of the current
        command, and whether it is over.
        """
        state = self._pools[residents[0].pool]
        membership, board = state.membership, state.board
        new = [r for r in residents if not membership.includes(r.sender)]
        if not new:
            return board.number, board.collected
        for resident in new:
            if membership.join(resident):
                state.log.record_restart(resident, state.command_name)
            state.log.hear(resident.index)
        membership.lost |= set(absent)
        # They may have answered before they died, with a state that died with them.
        if not board.collected:
            for index in (*(resident.index for resident in new), *absent):
                board.remove_reply(index)
        membership.changed.notify()
        board.replied.notify()  # `absent` may have been all that was waited for
        return board.number, board.collected

    async def exchange(
        self, pool: str, after: int, replies: Sequence[Reply]
    ) -> tuple[int, Command]:
        """Take replies, return the next command: the one call of a resident for each command."""
        if replies:
            await self.receive(replies)
        return await self._board(pool).next_command(after)

    async def receive(self, messages: Sequence[Reply | Report]) -> None:
        """Take messages of a pool's residents; drop late ones about an earlier command."""
        state = self._pools[messages[0].sender[0]]
        for message in messages:
            is_late = message.number != state.board.number
            if is_late or not state.membership.includes(message.sender):
                continue
            if isinstance(message, Reply):
                self._take_reply(state, message)
            elif message.progress is not None:
                state.log.report(message.sender[1], message.progress)
        state.board.replied.notify()

    async def is_closed(self, pool: str) -> bool:
        """Return whether the residents of the pool are asked to leave."""
        return isinstance(self._board(pool).command, Close)

    def _take_reply(self, state: PoolState, reply: Reply) -> None:
        board, index = state.board, reply.sender[1]
        if index in board.replies:
            return
        state.log.hear(index)
        board.replies[index] = reply.value
        if reply.failed:
            board.failed.add(index)

    async def shared(self) -> list[Any] | None:
        """Return where the in-memory data set is."""
        return self._shared

    # Called by the driver.

    async def residents(self, pool: str, count: int) -> list[Resident]:
        """Return the residents by index, without lost ones, once `count` have joined."""
        membership = self._pools[pool].membership
        await membership.changed.wait_for(lambda: membership.is_complete(count))
        return membership.present()

    async def joined(self, pool: str) -> list[Resident]:
        """Return the residents that have joined so far."""
        return list(self._pools[pool].membership.residents.values())

    async def lose(self, pool: str, index: int) -> None:
        """Give a resident up: nobody waits for it until it joins again."""
        state = self._pools[pool]
        state.membership.lost.add(index)
        state.membership.changed.notify()
        state.board.replied.notify()

    async def status(self, pool: str) -> PoolStatus:
        """Return what the driver looks at while it waits."""
        state = self._pools[pool]
        return PoolStatus(
            frozenset(state.membership.lost),
            state.membership.restarts,
            state.log.silence_s(),
            state.log.slowest(),
        )

    async def post(self, pool: str, number: int, command: Command) -> None:
        """Make `command` the current one. The driver numbers its commands from 1."""
        state = self._pools[pool]
        if state.board.post(number, command):
            state.log.begin_command()
            if isinstance(command, Regroup):  # who joins now was not restarted by a death
                state.membership.residents.clear()
                state.membership.lost.clear()

    async def collect(self, pool: str, number: int, expected: Sequence[int]) -> dict[int, Any]:
        """Return the replies, when all expected but lost residents answered or one could not."""
        state = self._pools[pool]
        await state.board.replied.wait_for(
            lambda: state.board.is_answered(number, expected, state.membership.lost)
        )
        if state.board.number == number:
            state.board.collected = True
        return dict(state.board.replies)

    async def overdue(self, pool: str, expected: Iterable[int]) -> list[Overdue]:
        """Return the residents that have not answered, the one furthest behind first."""
        state = self._pools[pool]
        late = set(expected) - state.board.replies.keys() - state.membership.lost
        return state.log.overdue(late)

    async def new_events(self, pool: str, received: int) -> tuple[float, list[Event]]:
        """Return the time now, and the events after the first `received`, on this clock."""
        return self._pools[pool].log.new_events(received)
