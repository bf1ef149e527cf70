"""Relays without Ray: a handle is an object whose calls are counted and run as tasks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from raytrain_opt.pools import relay as module
from raytrain_opt.pools.commands import (
    Close,
    CommandTime,
    Instruction,
    Progress,
    Reply,
    Report,
    Resident,
    SendInitialState,
)
from raytrain_opt.pools.mailbox import Exchange, Mailbox
from raytrain_opt.pools.relay import Relay, relay_levels

T = TypeVar("T")
LIMIT_S = 10.0


class Handle:
    """Calls an actor's methods as Ray does; `calls` counts them."""

    def __init__(self, actor: Exchange) -> None:
        self.actor, self.calls = actor, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        return _Method(self, name)


class _Method:
    def __init__(self, handle: Handle, name: str) -> None:
        self._handle, self._name = handle, name

    def remote(self, *arguments: Any) -> asyncio.Task[Any]:
        self._handle.calls[self._name] += 1
        return asyncio.create_task(getattr(self._handle.actor, self._name)(*arguments))


class Tree:
    """A mailbox and the relays of a pool of this size."""

    def __init__(self, residents: int, fan_out: int) -> None:
        self.box = Mailbox()
        self.levels = [[Handle(self.box)]]
        for count in relay_levels(residents, fan_out):
            above = self.levels[-1]
            self.levels.append([Handle(Relay(above[i % len(above)])) for i in range(count)])

    def relay_of(self, index: int) -> Handle:
        return self.levels[-1][index % len(self.levels[-1])]

    async def start(self, residents: int) -> None:
        for index in range(residents):
            await self.box.join(resident(index))


def resident(index: int) -> Resident:
    return Resident("worker", index, "node", 1, "log")


def play(scene: Callable[[], Awaitable[T]]) -> T:
    """Run a scene; a scene that hangs fails."""

    async def limited() -> T:
        return await asyncio.wait_for(scene(), LIMIT_S)

    return asyncio.run(limited())


async def serve(relay: Handle, index: int) -> None:
    """Reply with the index until the pool is closed, as a resident does."""
    number, reply = 0, None
    while True:
        number, command = await relay.exchange.remote("worker", number, reply)
        if isinstance(command, Close):
            return
        reply = Reply(resident(index).sender, number, index)


def test_as_many_relays_as_needed_so_that_no_actor_has_more_callers_than_the_limit() -> None:
    assert relay_levels(8, 32) == []
    assert relay_levels(9, 32) == [1]
    assert relay_levels(32, 32) == [1]
    assert relay_levels(33, 32) == [2]
    assert relay_levels(384, 32) == [12]
    assert relay_levels(1024, 32) == [3, 32]
    assert relay_levels(4096, 32) == [11, 128]


@pytest.mark.parametrize("residents", [5, 64])
def test_commands_go_down_and_all_replies_come_up(residents: int) -> None:
    async def scene() -> None:
        tree = Tree(residents, fan_out=4)
        await tree.start(residents)
        lives = [asyncio.create_task(serve(tree.relay_of(i), i)) for i in range(residents)]
        for number in range(1, 4):
            await tree.box.post("worker", number, SendInitialState())
            replies = await tree.box.collect("worker", number, range(residents))
            assert replies == {index: index for index in range(residents)}
        await tree.box.post("worker", 4, Close())
        await asyncio.gather(*lives)

    play(scene)


def test_the_calls_of_the_mailbox_do_not_grow_with_the_residents() -> None:
    commands = 5

    async def scene(residents: int) -> int:
        tree = Tree(residents, fan_out=8)
        await tree.start(residents)
        lives = [asyncio.create_task(serve(tree.relay_of(i), i)) for i in range(residents)]
        for number in range(1, commands + 1):
            await tree.box.post("worker", number, SendInitialState())
            await tree.box.collect("worker", number, range(residents))
        await tree.box.post("worker", commands + 1, Close())
        await asyncio.gather(*lives)
        return tree.levels[0][0].calls.total()

    # A poll and at most two batches of each caller per command: residents of one relay that
    # reply together may still be cut into two batches.
    for residents in (64, 512):
        assert play(lambda n=residents: scene(n)) <= 8 * (3 * commands + 1)  # type: ignore[misc]


def test_progress_goes_up_with_that_of_others_only_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_REPORTS_WAIT_S", 0.02)

    async def scene() -> int:
        tree = Tree(4, fan_out=2)
        await tree.start(4)
        await tree.box.post("worker", 1, SendInitialState())
        for done in range(1, 4):
            for index in range(4):
                report = Report(resident(index).sender, 1, Progress(done + index, 9))
                assert await tree.relay_of(index).actor.report(report) == Instruction()
        while (await tree.box.status("worker")).progress is None:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.04)
        late = await tree.box.overdue("worker", range(4))
        assert [overdue.progress for overdue in late] == [Progress(3 + i, 9) for i in range(4)]
        return tree.levels[0][0].calls["receive"]

    assert play(scene) == 2


def test_a_resident_at_work_learns_from_its_relay_that_the_pool_is_closed() -> None:
    async def scene() -> None:
        tree = Tree(3, fan_out=2)
        await tree.start(3)
        await tree.box.post("worker", 1, SendInitialState())
        relay = tree.relay_of(2).actor
        assert await relay.next_command("worker", 0) == (1, SendInitialState())
        assert await relay.report(Report(resident(2).sender, 1, None)) == Instruction()
        await tree.box.post("worker", 2, Close())
        while not (await relay.report(Report(resident(2).sender, 1, None))).closed:
            await asyncio.sleep(0.001)

    play(scene)


def test_a_call_that_passes_replies_on_lasts_until_the_mailbox_has_them() -> None:
    """A relay above that dies before would lose them otherwise: the call is then repeated."""

    async def scene() -> dict[int, Any]:
        tree = Tree(5, fan_out=2)  # two levels
        await tree.start(5)
        await tree.box.post("worker", 1, SendInitialState())
        upper = tree.levels[1][0].actor
        await upper.receive([Reply(resident(1).sender, 1, "b"), Reply(resident(0).sender, 1, "a")])
        return await tree.box.collect("worker", 1, [0, 1])

    assert play(scene) == {0: "a", 1: "b"}


def test_residents_that_are_to_stop_early_agree_through_their_relays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the latest of the steps before which each one can stop."""
    monkeypatch.setattr(module, "_REPORTS_WAIT_S", 0.01)

    async def report(tree: Tree, index: int, can_stop_before: int | None) -> Instruction:
        message = Report(resident(index).sender, 1, Progress(index, 9), can_stop_before)
        return await tree.relay_of(index).actor.report(message)

    async def scene() -> None:
        tree = Tree(5, fan_out=2)
        await tree.start(5)
        await tree.box.post("worker", 1, SendInitialState())
        await tree.box.stop_early("worker", 1)
        for index in range(5):
            while (await report(tree, index, None)).stopping != 1:
                await asyncio.sleep(0.001)
        for index in range(5):
            assert (await report(tree, index, index + 1)).stop_before is None
        for index in range(5):
            while (await report(tree, index, index + 1)).stop_before != 5:
                await asyncio.sleep(0.001)

    play(scene)


def test_times_go_up_of_recorded_residents_and_of_the_one_that_took_longest() -> None:
    class Upstream(Mailbox):
        received: list[Any] = []

        async def receive(self, messages: Any) -> dict[str, Instruction]:
            self.received.extend(messages)
            return await super().receive(messages)

    async def scene() -> None:
        durations = [CommandTime(duration_s=float(i % 19)) for i in range(20)]
        replies = [Reply(resident(i).sender, 1, "", time=time) for i, time in enumerate(durations)]
        await Relay(Handle(Upstream())).receive(replies)

    play(scene)
    assert [r.sender[1] for r in Upstream.received] == list(range(20))
    assert [r.sender[1] for r in Upstream.received if r.time] == [*range(16), 18]
