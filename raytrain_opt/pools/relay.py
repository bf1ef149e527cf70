"""Relays: actors between the residents of a large pool and the mailbox.

A call of a Ray actor costs it about a millisecond of CPU, so a mailbox that every resident called
would need seconds per command for thousands of them. With relays, each actor has a limited number
of callers: residents call relays, these call relays above them, and a few call the mailbox
(`relay_levels`). Replies go up many in one call; a command goes down once per relay.

A relay keeps nothing that is lost with it: its callers' calls are pending until the next command,
and Ray repeats them when it has restarted the relay. Nothing here uses Ray.

Residents on its node send it their replies over a socket (`node_socket`), for a thirtieth of the
CPU: many processes of a node share its cores, and a command is as slow as the last of them. Ray
does not count references that go another way, so states go as their names.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from raytrain_opt.pools.commands import (
    Close,
    Command,
    Instruction,
    Reply,
    Report,
    Sender,
    StateRef,
)
from raytrain_opt.pools.mailbox import Exchange
from raytrain_opt.pools.mailbox_state import RECORDED_RESIDENTS, CommandBoard
from raytrain_opt.pools.node_socket import PackedCommand, listen, pack

# Residents that call the mailbox itself: up to here, direct calls are faster than a relay.
_DIRECT = 8
# Residents that call one relay, which takes about 15 ms for this many calls from other nodes.
FAN_OUT = 32
# Relays that call one actor, each twice per command; more levels would take longer.
_FAN_OUT_OF_RELAYS = 12

# How long messages wait for others to go with them. Replies that complete those of all callers do
# not wait, so this delays a command only when a caller fails. Reports come every second.
_REPLIES_WAIT_S, _REPORTS_WAIT_S = 0.5, 2.0


def relay_levels(residents: int, fan_out: int = FAN_OUT) -> list[int]:
    """Return the number of relays of each level, the one below the mailbox first; maybe none."""
    if residents <= min(_DIRECT, fan_out):
        return []
    levels = [ceil(residents / fan_out)]
    fan_out_of_relays = min(_FAN_OUT_OF_RELAYS, fan_out)
    while levels[0] > fan_out_of_relays:
        levels.insert(0, ceil(levels[0] / fan_out_of_relays))
    return levels


@dataclass(frozen=True)
class Upstream:
    """What a resident calls: the mailbox, or a relay that also listens on its node."""

    actor: Any
    socket_name: str = ""


class Relay(Exchange):
    """Passes messages on to `upstream`, the handle of the mailbox or of a relay above.

    With a `socket_name` it also listens under it, from the first call of `exchange` on.
    """

    def __init__(self, upstream: Any, socket_name: str = "") -> None:
        self._upstream = upstream
        self._socket_name = socket_name
        self._server: asyncio.AbstractServer | None = None
        self._packed: dict[str, PackedCommand] = {}
        self._replies = _Outbox(upstream, _REPLIES_WAIT_S)
        self._reports = _Outbox(upstream, _REPORTS_WAIT_S)
        self._boards: dict[str, CommandBoard] = {}
        self._working = Counter[str]()  # callers that have a pool's current command
        self._followers: set[asyncio.Task[None]] = set()

    def _board(self, pool: str) -> CommandBoard:
        """Return the pool's board, a copy of the one upstream from the first call on."""
        if pool not in self._boards:
            board = self._boards[pool] = CommandBoard()
            self._followers.add(asyncio.create_task(self._follow(pool, board)))
        return self._boards[pool]

    async def _follow(self, pool: str, board: CommandBoard) -> None:
        while not isinstance(board.command, Close):
            board.post(*await self._upstream.next_command.remote(pool, board.number))
            self._working[pool] = 0

    async def exchange(self, pool: str, after: int, reply: Reply | None) -> tuple[int, Command]:
        if self._socket_name:
            name, self._socket_name = self._socket_name, ""
            self._server = await listen(name, self._answer)
        return await super().exchange(pool, after, reply)

    async def _answer(self, request: bytes) -> bytes:
        """Do what `exchange` does, for a resident that calls over the socket."""
        pool, after, reply = pickle.loads(request)
        return self._pack(pool, *await super().exchange(pool, after, reply)).content

    def _pack(self, pool: str, number: int, command: Command) -> PackedCommand:
        if pool not in self._packed or self._packed[pool].number != number:
            self._packed[pool] = pack(number, command)
        return self._packed[pool]

    async def state(self, pool: str, state_id: str) -> StateRef | None:
        """Return a state that the pool's current command names."""
        current = await self._board(pool).next_command(0)
        return self._pack(pool, *current).states.get(state_id)

    async def next_command(self, pool: str, after: int) -> tuple[int, Command]:
        answer = await super().next_command(pool, after)
        self._working[pool] += 1
        return answer

    async def receive(self, messages: Sequence[Reply | Report]) -> dict[str, Instruction]:
        """Pass messages on; return when upstream has the replies. Reports may be lost."""
        replies = [message for message in messages if isinstance(message, Reply)]
        if len(replies) < len(messages):
            self._reports.add(m for m in messages if isinstance(m, Report))
        if replies:
            pools = {reply.sender[0] for reply in replies}
            self._working.subtract(pools)
            is_last = all(self._working[pool] <= 0 for pool in pools)
            await self._replies.add(replies, at_once=is_last)
        return {pool: self._instruction(pool) for pool in {m.sender[0] for m in messages}}

    def _instruction(self, pool: str) -> Instruction:
        known = self._reports.instructions.get(pool, Instruction())
        return replace(known, closed=isinstance(self._board(pool).command, Close))


class _Outbox:
    """Sends messages upstream, one call at a time, with the newest message of each sender."""

    def __init__(self, upstream: Any, wait_s: float) -> None:
        self._upstream, self._wait_s = upstream, wait_s
        self._messages: dict[Sender, Reply | Report] = {}
        self._next: asyncio.Task[None] | None = None
        self._due, self._one_call = asyncio.Event(), asyncio.Lock()
        self.instructions: dict[str, Instruction] = {}  # by pool, as of the last call

    def add(
        self, messages: Iterable[Reply | Report], *, at_once: bool = False
    ) -> asyncio.Task[None]:
        """Send the messages with the next call; return that call."""
        self._messages.update((message.sender, message) for message in messages)
        if at_once:
            self._due.set()
        if self._next is None:
            self._next = asyncio.create_task(self._send())
        return self._next

    async def _send(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._due.wait(), self._wait_s)
        async with self._one_call:  # what comes meanwhile goes with this one, too
            messages, self._messages, self._next = _thinned([*self._messages.values()]), {}, None
            self._due.clear()
            self.instructions |= await self._upstream.receive.remote(messages)


def _thinned(messages: Sequence[Reply | Report]) -> list[Reply | Report]:
    """Leave out times that are not recorded: most of what the mailbox would have to read."""
    others = {
        m.sender: m.time.duration_s
        for m in messages
        if isinstance(m, Reply) and m.time and m.sender[1] >= RECORDED_RESIDENTS
    }
    longest = max(others, key=lambda sender: others[sender], default=None)
    unused = others.keys() - {longest}
    return [
        replace(m, time=None) if isinstance(m, Reply) and m.sender in unused else m
        for m in messages
    ]
