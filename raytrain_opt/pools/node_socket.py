"""Requests and answers between processes of one node and one user, over a Unix socket.

Its name is in Linux's abstract namespace: there is no file, nothing is left when the process that
listens has died, and other machines cannot see it. Both sides check that the other one is of the
same user, because they unpickle what it sends.

Commands travel as bytes, with the names of states for references: Ray does not count those that
go another way.
"""

from __future__ import annotations

import asyncio
import io
import os
import pickle
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from raytrain_opt.pools.commands import Command, StateRef

_LENGTH = struct.Struct("!i")  # as `Connection` writes and reads it
_PEER = struct.Struct("3i")  # process, user, group


async def listen(
    name: str, answer: Callable[[bytes], Awaitable[bytes]]
) -> asyncio.AbstractServer | None:
    """Answer requests of this node; None where the system has no such sockets.

    A connection ends when `answer` raises.
    """
    if sys.platform != "linux":
        return None
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
    except OSError:  # a sandbox without this namespace
        listener.close()
        return None

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            _check_user(writer.get_extra_info("socket"))
            while True:
                [length] = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                message = await answer(await reader.readexactly(length))
                writer.write(_LENGTH.pack(len(message)) + message)
        except (asyncio.IncompleteReadError, ConnectionError):  # the other process has left
            pass
        finally:
            writer.close()

    return await asyncio.start_unix_server(serve, sock=listener)


def connect(name: str) -> Connection:
    """Connect to who listens. Raises OSError, as does the connection, or EOFError at its end."""
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(f"\0{name}")
        _check_user(connected)
        return Connection(connected.detach())


def _check_user(connected: socket.socket) -> None:
    peer = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    if _PEER.unpack(peer)[1] != os.getuid():
        raise PermissionError("a process of another user")


@dataclass(frozen=True)
class PackedCommand:
    """A command of this number, and the references that its bytes have only the names of."""

    number: int
    content: bytes
    states: dict[str, StateRef]


def pack(number: int, command: Command) -> PackedCommand:
    """Pickle a command, each of its states as a name."""
    content, states = io.BytesIO(), dict[str, StateRef]()
    pickler = _Pickler(content)
    pickler.states = states
    pickler.dump((number, command))
    return PackedCommand(number, content.getvalue(), states)


def unpack(content: bytes, fetch: Callable[[str], Any]) -> tuple[int, Command]:
    """Return number and command. `fetch(id)` is called when a state is needed, for its `ref`."""
    unpickler = _Unpickler(io.BytesIO(content))
    unpickler.fetch = fetch
    unpacked: tuple[int, Command] = unpickler.load()
    return unpacked


class _Pickler(pickle.Pickler):
    states: dict[str, StateRef]

    def persistent_id(self, obj: object) -> tuple[str, str | None, str] | None:
        if not isinstance(obj, StateRef):
            return None
        self.states[obj.id] = obj
        return obj.id, obj.sha256, obj.node_id


class _Unpickler(pickle.Unpickler):
    fetch: Callable[[str], Any]

    def persistent_load(self, pid: tuple[str, str | None, str]) -> StateRef:
        state_id, sha256, node_id = pid
        return StateRef(state_id, partial(self.fetch, state_id), sha256, node_id)
