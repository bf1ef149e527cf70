"""Residents that call their relay over a socket, the relay in a thread, without Ray."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypeVar
from uuid import uuid4

import pytest

from raytrain_opt.pools import node_socket
from raytrain_opt.pools.commands import Close, Evaluate, MainTrain, Reply, Resident, StateRef
from raytrain_opt.pools.mailbox import Mailbox
from raytrain_opt.pools.node_socket import unpack
from raytrain_opt.pools.relay import Relay
from raytrain_opt.results import Steps
from tests.unit.pools.test_relay import Handle

T = TypeVar("T")
COMMAND = MainTrain(StateRef("1.500", "the reference", "abc", "node"), 2, Steps(0, (0.1, 0.2)))
RESIDENT = Resident("worker", 0, "node", 1, "log")


class Thread:
    """A mailbox and a relay that listens, in an event loop of their own."""

    def __init__(self) -> None:
        self.name, self._loop = f"raytrain_opt-test-{uuid4().hex}", asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._connections: list[Connection] = []
        self.box = Mailbox()
        self.relay = Relay(Handle(self.box), self.name)
        self.run(self.box.join(RESIDENT))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def stop(self) -> None:
        self.run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _end(self) -> None:
        """Wait until nobody is connected and nothing runs any more."""
        await self.box.post("worker", 99, Close())
        for connection in self._connections:
            connection.close()
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.001)
        if self.relay._server is not None:  # ends with the process otherwise
            self.relay._server.close()

    def connect(self) -> Connection:
        """Take the first command as a resident does; then the relay listens."""
        self.run(self.box.post("worker", 1, COMMAND))
        assert self.run(self.relay.exchange("worker", 0, None)) == (1, COMMAND)
        self._connections.append(node_socket.connect(self.name))
        return self._connections[-1]


@contextmanager
def thread() -> Iterator[Thread]:
    started = Thread()
    try:
        yield started
    finally:
        started.stop()


def reply(number: int) -> bytes:
    """Return what a resident sends that has executed this command."""
    return pickle.dumps(("worker", number, Reply(RESIDENT.sender, number, b"done")))


def no_state(_: str) -> NoReturn:
    raise AssertionError("no state is needed")


def test_replies_go_up_and_commands_come_down_with_the_names_of_their_states() -> None:
    fetched = []
    with thread() as running:
        connection = running.connect()
        connection.send_bytes(reply(1))
        assert running.run(running.box.collect("worker", 1, [0])) == {0: b"done"}
        running.run(running.box.post("worker", 2, COMMAND))
        number, command = unpack(connection.recv_bytes(), lambda i: fetched.append(i) or "ref")
        assert isinstance(command, MainTrain)
        assert (number, command.steps.lrs, command.state.id) == (2, (0.1, 0.2), "1.500")
        assert (command.state.sha256, command.state.node_id) == ("abc", "node")
        assert fetched == []
        assert (command.state.ref(), fetched) == ("ref", ["1.500"])
        assert running.run(running.relay.state("worker", "1.500")) == COMMAND.state

        connection.send_bytes(reply(2))
        running.run(running.box.post("worker", 3, Evaluate(StateRef("3.1", "another"))))
        assert unpack(connection.recv_bytes(), no_state)[0] == 3
        assert running.run(running.relay.state("worker", "1.500")) is None

        connection.send_bytes(reply(3))
        running.run(running.box.post("worker", 4, Close()))
        assert unpack(connection.recv_bytes(), no_state) == (4, Close())


def test_a_resident_that_leaves_while_it_waits_harms_nobody() -> None:
    with thread() as running:
        running.connect().close()
        leaving, staying = running.connect(), running.connect()
        leaving.send_bytes(reply(1))
        staying.send_bytes(reply(1))
        leaving.close()
        running.run(running.box.post("worker", 2, Close()))
        assert unpack(staying.recv_bytes(), no_state) == (2, Close())


def test_nobody_listens_before_the_first_call_and_after_the_end() -> None:
    with thread() as running:
        with pytest.raises(OSError, match="refused"):
            node_socket.connect(running.name)
        running.connect()
    with pytest.raises(OSError, match="refused"):
        node_socket.connect(running.name)


@pytest.mark.parametrize("in_client", [True, False])
def test_processes_of_other_users_are_refused(
    in_client: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    me, real = threading.current_thread(), os.getuid()

    def getuid() -> int:
        return real + ((threading.current_thread() is me) == in_client)

    def talk() -> None:
        with node_socket.connect(running.name) as connection:
            connection.send_bytes(reply(1))
            connection.recv_bytes()

    with thread() as running:
        running.connect().close()
        monkeypatch.setattr(os, "getuid", getuid)
        with pytest.raises(PermissionError if in_client else (EOFError, ConnectionError)):
            talk()
