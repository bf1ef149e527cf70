"""Requests and answers between processes of one node and one user, over a Unix socket.

Its name is in Linux's abstract namespace: there is no file, nothing is left when the process that
listens has died, and other machines cannot see it. Both sides check that the other one is of the
same user, because they unpickle what it sends.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection

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
