"""The mailbox without Ray: coroutines stand for the driver and the members."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pytest

from raytrain_opt.pools.commands import Close, Failure, Member, Progress, ShareState, StateLost
from raytrain_opt.pools.mailbox import Mailbox
from raytrain_opt.telemetry.timeline import Span
from raytrain_opt.telemetry.usage import Usage

T = TypeVar("T")
LIMIT_S = 5.0


def play(scene: Callable[[Mailbox], Awaitable[T]]) -> T:
    """Run a scene with a new mailbox; one that hangs fails."""

    async def limited() -> T:
        return await asyncio.wait_for(scene(Mailbox()), LIMIT_S)

    return asyncio.run(limited())


async def waiting(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Started, and shown to be waiting for something that has not happened."""
    task = asyncio.create_task(work)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    return task


def member(index: int, pid: int = 1) -> Member:
    return Member("slot", index, "node", pid, "log")


def test_members_are_given_when_all_have_joined_in_order() -> None:
    async def scene(box: Mailbox) -> list[Member]:
        asked = await waiting(box.members("slot", 2))
        await box.join(member(1))
        assert await box.joined("slot") == [member(1)]
        assert not asked.done()
        await box.join(member(0))
        return await asked

    assert play(scene) == [member(0), member(1)]


def test_a_command_goes_out_and_replies_come_back() -> None:
    async def scene(box: Mailbox) -> dict[int, Any]:
        idle = await waiting(box.next_command("slot", 0))
        number = await box.post("slot", ShareState())
        assert await idle == (number, ShareState())
        collected = await waiting(box.collect("slot", number, range(2)))
        await box.reply("slot", 1, number, "b")
        assert [m.index for m in await box.missing("slot", range(2))] == [0]
        await waiting(box.next_command("slot", number))
        assert not collected.done()
        await box.reply("slot", 0, number, "a")
        return await collected

    assert play(scene) == {0: "a", 1: "b"}


def test_pools_do_not_hear_each_other() -> None:
    async def scene(box: Mailbox) -> None:
        number = await box.post("slot", ShareState())
        await waiting(box.next_command("worker", 0))
        collected = await waiting(box.collect("slot", number, range(1)))
        await box.post("worker", ShareState())
        await box.reply("worker", 0, 1, "of another pool")
        await asyncio.sleep(0)
        assert not collected.done()
        assert [m.index for m in await box.missing("slot", range(1))] == [0]

    play(scene)


@pytest.mark.parametrize("value", [Failure(RuntimeError("boom"), "trace"), StateLost("3")])
def test_who_cannot_answer_ends_the_wait_at_once(value: object) -> None:
    async def scene(box: Mailbox) -> dict[int, Any]:
        number = await box.post("slot", ShareState())
        collected = await waiting(box.collect("slot", number, range(3)))
        await box.reply("slot", 2, number, value)
        return await collected

    assert play(scene) == {2: value}


def test_a_late_reply_to_an_earlier_command_is_dropped() -> None:
    async def scene(box: Mailbox) -> dict[int, Any]:
        first = await box.post("slot", ShareState())
        second = await box.post("slot", ShareState())
        assert second > first
        collected = await waiting(box.collect("slot", second, range(1)))
        await box.reply("slot", 0, first, "late")
        assert [m.index for m in await box.missing("slot", range(1))] == [0]
        await box.reply("slot", 0, second, "now")
        return await collected

    assert play(scene) == {0: "now"}


def test_replies_to_one_command_are_gone_with_the_next() -> None:
    async def scene(box: Mailbox) -> list[int]:
        number = await box.post("slot", ShareState())
        await box.reply("slot", 0, number, "done")
        await box.post("slot", ShareState())
        return [m.index for m in await box.missing("slot", range(1))]

    assert play(scene) == [0]


def test_a_collect_of_an_earlier_command_does_not_wait_forever() -> None:
    async def scene(box: Mailbox) -> dict[int, Any]:
        number = await box.post("slot", ShareState())
        collected = await waiting(box.collect("slot", number, range(1)))
        await box.post("slot", ShareState())
        return await collected

    assert play(scene) == {}


def test_who_was_started_again_joins_anew_and_gets_the_present_command() -> None:
    async def scene(box: Mailbox) -> tuple[int, list[Member], int]:
        await box.join(member(0, pid=1))
        await box.join(member(1, pid=2))
        before = await box.restarts("slot")
        number = await box.post("slot", ShareState())
        await box.join(member(0, pid=3))
        assert await box.next_command("slot", 0) == (number, ShareState())
        return before, await box.members("slot", 2), await box.restarts("slot")

    assert play(scene) == (0, [member(0, pid=3), member(1, pid=2)], 1)


def test_close_is_heard_by_members_that_wait_for_it_alone() -> None:
    async def scene(box: Mailbox) -> bool:
        closed = await waiting(box.closed("slot"))
        await box.post("slot", ShareState())
        await box.post("worker", Close())
        await waiting(box.closed("slot"))
        assert not closed.done()
        await box.post("slot", Close())
        return await closed

    assert play(scene) is True


def test_progress_is_that_of_the_member_furthest_behind() -> None:
    async def scene(box: Mailbox) -> list[Progress | None]:
        seen = [await box.progress("slot")]
        await box.post("slot", ShareState())
        await box.report_progress("slot", 0, Progress(5, 10))
        await box.report_progress("slot", 1, Progress(8, 20))
        seen.append(await box.progress("slot"))
        await box.report_progress("slot", 1, Progress(15, 20))
        seen.append(await box.progress("slot"))
        await box.post("slot", ShareState())
        return [*seen, await box.progress("slot")]

    assert play(scene) == [None, Progress(8, 20), Progress(5, 10), None]


def test_the_first_step_of_anybody_is_told_once_and_remembered() -> None:
    async def scene(box: Mailbox) -> bool:
        first = await waiting(box.first_step())
        await box.report_progress("slot", 0, Progress(0, 10))
        await waiting(box.first_step())
        await box.report_progress("slot", 0, Progress(1, 10))
        assert await first
        await box.post("slot", ShareState())
        return await box.first_step()

    assert play(scene) is True


def test_shared_data_wait_for_the_driver_even_when_they_are_none() -> None:
    async def scene(box: Mailbox) -> list[Any]:
        asked = await waiting(box.shared_data())
        await box.share_data([None])
        return await asked

    assert play(scene) == [None]


def test_nobody_waits_for_a_member_that_is_lost() -> None:
    async def scene(box: Mailbox) -> dict[int, Any]:
        await box.join(member(0))
        joined = await waiting(box.members("slot", 2))
        number = await box.post("slot", ShareState())
        collected = await waiting(box.collect("slot", number, range(2)))
        await box.reply("slot", 0, number, "a")
        await box.lose("slot", 1)
        assert await joined == [member(0)]
        assert await box.lost("slot") == [1]
        assert await box.missing("slot", range(2)) == []
        return await collected

    assert play(scene) == {0: "a"}


def test_the_member_furthest_behind_is_named_first_with_what_it_told() -> None:
    async def scene(box: Mailbox) -> None:
        await box.post("worker", ShareState())
        await box.report_progress("worker", 0, Progress(5, 9))
        await box.report_progress("worker", 1, Progress(3, 9))
        missing = await box.missing("worker", range(3))
        assert [m.index for m in missing] == [2, 1, 0]
        assert [m.progress for m in missing] == [None, Progress(3, 9), Progress(5, 9)]
        assert missing[0].silent_s > missing[2].silent_s >= missing[1].silent_s >= 0

    play(scene)


def test_only_progress_ends_the_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("raytrain_opt.pools.mailbox.monotonic_s", lambda: now[0])

    async def scene(box: Mailbox) -> None:
        number = await box.post("worker", ShareState())
        now[0] += 5
        assert await box.silence_s("worker") == 5
        await box.report_progress("worker", 0, Progress(1, 9))
        now[0] += 2
        await box.report_progress("worker", 0, Progress(1, 9))
        assert await box.silence_s("worker") == 2
        await box.report_progress("worker", 0, Progress(2, 9))
        assert await box.silence_s("worker") == 0
        now[0] += 3
        await box.reply("worker", 0, number, "done")
        assert await box.silence_s("worker") == 0
        now[0] += 4
        await box.join(Member("worker", 1, "node", 2, "log"))
        assert await box.silence_s("worker") == 0

    play(scene)


def test_only_the_first_to_ask_is_the_first() -> None:
    async def scene(box: Mailbox) -> list[bool]:
        return [await box.is_first(what) for what in ("a", "b", "a", "a", "b")]

    assert play(scene) == [True, True, False, False, False]


def test_a_group_that_started_again_with_fewer_does_without_the_others() -> None:
    def worker(rank: int, *absent: int) -> Member:
        return Member("worker", rank, "node", 1, "log", absent=absent)

    async def scene(box: Mailbox) -> dict[int, Any]:
        for rank in range(2):
            await box.join(worker(rank))
        number = await box.post("worker", ShareState())
        collected = await waiting(box.collect("worker", number, range(2)))
        await box.join(worker(0, 1))
        assert (await box.lost("worker"), await box.restarts("worker")) == ([1], 1)
        assert not collected.done()
        await box.reply("worker", 0, number, "alone")
        assert await collected == {0: "alone"}
        for rank in range(2):
            await box.join(worker(rank))
        return await box.lost("worker")

    assert play(scene) == []


def test_what_members_did_is_told_once_with_when_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("raytrain_opt.pools.mailbox.monotonic_s", lambda: now[0])

    async def scene(box: Mailbox) -> None:
        number = await box.post("slot", ShareState())
        now[0] += 5
        usage = Usage(seconds=2.0, utilization_pct=80.0, memory_mib=300.0, parts_s={"load_s": 0.5})
        await box.reply("slot", 1, number, "done", usage)
        await box.reply("slot", 0, number - 1, "late", usage)
        span = Span("slot 1", "share_state", 103.0, 2.0, {"load_s": 0.5}, 80.0, 300.0)
        assert await box.take_log("slot") == (105.0, [span], [])
        assert await box.take_log("slot") == (105.0, [], [])
        assert await box.take_log("worker") == (105.0, [], [])

    play(scene)


def test_a_restart_costs_what_passed_since_the_last_sign_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("raytrain_opt.pools.mailbox.monotonic_s", lambda: now[0])

    async def scene(box: Mailbox) -> None:
        await box.join(member(1))
        await box.post("slot", ShareState())
        now[0] += 3
        await box.report_progress("slot", 1, Progress(1, 9))
        now[0] += 7
        await box.join(member(1, pid=2))
        _, _, [event] = await box.take_log("slot")
        assert (event.what, event.who, event.at_s, event.cost_s) == ("restarted", "slot 1", 110, 7)
        assert event.text == "slot 1 was started again, during share_state"

    play(scene)
