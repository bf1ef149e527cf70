"""The mailbox: the actor through which the driver and the residents of both pools talk.

The driver posts a command to a pool and collects one reply per resident. A resident makes one call
per command: it brings the reply to the last command and returns with the next one. For workers
that form a process group, the first rank does so for all of them (`resident`). A restarted
resident joins again, gets the current command and repeats it from the same state, or waits for the
next one when the driver has the replies. Nothing here uses Ray, so the tests need none. Callers
use `mailbox_client`.

Ray repeats a call whose connection was cut, and the first attempt may have been executed too:
every method has the same effect twice as once. Messages carry their sender; those of a process
that was replaced or given up are dropped.

What it knows of each pool is in `mailbox_state`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from raytrain_opt.pools.commands import (
    Command,
    Instruction,
    Overdue,
    PoolStatus,
    Regroup,
    Reply,
    Report,
    Resident,
    Sender,
)
from raytrain_opt.pools.mailbox_state import CommandBoard, PoolState
from raytrain_opt.recording.spans import Event, Span


class Mailbox:
    """Commands out, replies in. All methods are asynchronous, and none blocks another.

    `shared_data`: a list of the reference to the in-memory data set. Ray would fetch a bare one.
    """

    def __init__(self, shared_data: list[Any] | None = None) -> None:
        self._pools: dict[str, PoolState] = defaultdict(PoolState)
        self._shared_data = shared_data

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

    async def receive(self, messages: Sequence[Reply | Report]) -> Instruction:
        """Take messages of a pool's residents; drop late ones about an earlier command.

        Returns what the residents have to do.
        """
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
        return state.board.instruction()

    async def is_closed(self, pool: str) -> bool:
        """Return whether the residents of the pool are asked to leave."""
        return self._board(pool).instruction().closed

    def _take_reply(self, state: PoolState, reply: Reply) -> None:
        board, index = state.board, reply.sender[1]
        if index in board.replies:
            return
        state.log.hear(index)
        if reply.time is not None:
            state.log.record_command(reply.sender, state.command_name, reply.time)
        board.replies[index] = reply.value
        if reply.failed:
            board.failed.add(index)

    async def begin_hand_over(self, sender: Sender, number: int) -> None:
        """Expect a part of this command from a worker whose peer died, until the next command."""
        board = self._board(sender[0])
        if number == board.number:
            board.handing_over.add(sender)

    async def cancel_hand_over(self, sender: Sender) -> None:
        """Expect no part of this worker any more."""
        board = self._board(sender[0])
        board.handing_over.discard(sender)
        board.posted.notify()

    async def handed_over(self, pool: str) -> None:
        """Return when the driver has what residents of the pool are handing over."""
        board = self._board(pool)
        await board.posted.wait_for(lambda: not board.handing_over)

    async def shared_data(self) -> list[Any] | None:
        """Return where the in-memory data set is."""
        return self._shared_data

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
            any(state.log.has_trained for state in self._pools.values()),
        )

    async def post(self, pool: str, number: int, command: Command) -> None:
        """Make `command` the current one. The driver numbers its commands from 1."""
        state = self._pools[pool]
        if state.board.post(number, command):
            state.log.begin_command()
            if isinstance(command, Regroup):  # who joins now was not restarted by a death
                state.membership.residents.clear()

    async def stop_early(self, pool: str, number: int) -> None:
        """Let the residents end this command, a main training, before its last step."""
        board = self._pools[pool].board
        board.stopping = board.number == number

    async def collect(self, pool: str, number: int, expected: Sequence[int]) -> dict[int, Any]:
        """Return the replies, when all expected but lost residents answered or one could not."""
        state = self._pools[pool]
        await state.board.replied.wait_for(
            lambda: state.board.is_answered(number, expected, state.membership.lost)
        )
        state.log.end_command()
        if state.board.number == number:
            state.board.collected = True
        return dict(state.board.replies)

    async def overdue(self, pool: str, expected: Iterable[int]) -> list[Overdue]:
        """Return the residents that have not answered, the one furthest behind first."""
        state = self._pools[pool]
        late = set(expected) - state.board.replies.keys() - state.membership.lost
        return state.log.overdue(late)

    async def drain_log(self, pool: str, received: int) -> tuple[float, list[Span | Event]]:
        """Return the time now, and spans and events after the first `received`, on this clock."""
        return self._pools[pool].log.drain(received)
