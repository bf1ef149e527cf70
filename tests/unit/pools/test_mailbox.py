"""The mailbox without Ray: coroutines stand for the driver and the residents."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pytest

from raytrain_opt.pools.commands import (
    Close,
    Failure,
    Message,
    Progress,
    Regroup,
    Resident,
    SendInitialState,
    StateLost,
)
from raytrain_opt.pools.mailbox import Mailbox
from raytrain_opt.recording.records import Event

T = TypeVar("T")
LIMIT_S = 5.0


def play(scene: Callable[[Mailbox], Awaitable[T]]) -> T:
    """Run a scene with a new mailbox; a scene that hangs fails."""

    async def limited() -> T:
        return await asyncio.wait_for(scene(Mailbox()), LIMIT_S)

    return asyncio.run(limited())


async def waiting(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task, and check that it waits for something that has not happened."""
    task = asyncio.create_task(work)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    return task


def resident(index: int, pid: int = 1) -> Resident:
    return Resident("slot", index, "node", pid, "log")


def worker(rank: int, pid: int = 1) -> Resident:
    return Resident("worker", rank, "node", pid, "log")


async def join(box: Mailbox, *residents: Resident) -> None:
    for each in residents:
        await box.join([each])


async def reply(box: Mailbox, sender: Resident, number: int, value: Any) -> None:
    failed = isinstance(value, Failure | StateLost)
    await box.receive([Message(sender, number, value, failed)])


async def report(box: Mailbox, sender: Resident, number: int, progress: Progress) -> None:
    await box.receive([Message(sender, number, progress)])


async def post(box: Mailbox, pool: str, number: int) -> int:
    await box.post(pool, number, SendInitialState())
    return number


def test_a_command_goes_out_and_replies_come_back() -> None:
    async def scene(box: Mailbox) -> dict[int, Any]:
        await join(box, resident(0), resident(1))
        waiter = await waiting(box.exchange("slot", 0, []))
        number = await post(box, "slot", 1)
        assert await waiter == (number, SendInitialState())
        collected = await waiting(box.collect("slot", number, range(2)))
        await reply(box, resident(1), number, "b")
        assert [overdue.index for overdue in await box.overdue("slot", range(2))] == [0]
        await waiting(box.exchange("slot", number, []))
        assert not collected.done()
        await reply(box, resident(0), number, "a")
        return await collected

    assert play(scene) == {0: "a", 1: "b"}


@pytest.mark.parametrize("value", [Failure(RuntimeError("boom"), "trace"), StateLost("3")])
def test_a_resident_that_cannot_answer_ends_the_wait_at_once(value: object) -> None:
    async def scene(box: Mailbox) -> dict[int, Any]:
        await join(box, resident(2))
        number = await post(box, "slot", 1)
        collected = await waiting(box.collect("slot", number, range(3)))
        await reply(box, resident(2), number, value)
        return await collected

    assert play(scene) == {2: value}


def test_a_late_message_about_an_earlier_command_is_dropped() -> None:
    async def scene(box: Mailbox) -> dict[int, Any]:
        await join(box, resident(0))
        first = await post(box, "slot", 1)
        second = await post(box, "slot", 2)
        assert second > first
        collected = await waiting(box.collect("slot", second, range(1)))
        await report(box, resident(0), first, Progress(9, 9))
        assert (await box.status("slot")).progress is None
        await reply(box, resident(0), first, "late")
        assert [overdue.index for overdue in await box.overdue("slot", range(1))] == [0]
        await reply(box, resident(0), second, "now")
        return await collected

    assert play(scene) == {0: "now"}


def test_a_collect_of_an_earlier_command_does_not_wait_forever() -> None:
    async def scene(box: Mailbox) -> dict[int, Any]:
        number = await post(box, "slot", 1)
        collected = await waiting(box.collect("slot", number, range(1)))
        await post(box, "slot", 2)
        return await collected

    assert play(scene) == {}


def test_a_restarted_resident_joins_again_and_gets_the_current_command() -> None:
    async def scene(box: Mailbox) -> tuple[int, list[Resident], int]:
        await box.join([resident(0, pid=1)])
        await box.join([resident(1, pid=2)])
        before = (await box.status("slot")).restarts
        number = await post(box, "slot", 1)
        await box.join([resident(0, pid=3)])
        assert await box.exchange("slot", 0, []) == (number, SendInitialState())
        return before, await box.residents("slot", 2), (await box.status("slot")).restarts

    assert play(scene) == (0, [resident(0, pid=3), resident(1, pid=2)], 1)


def test_a_command_whose_replies_the_driver_has_is_over_for_who_is_restarted() -> None:
    """Also when Ray repeats the calls."""

    async def scene(box: Mailbox) -> None:
        await join(box, resident(0, pid=1))
        number = await post(box, "slot", 1)
        await reply(box, resident(0, pid=1), number, "a")
        assert await box.join([resident(0, pid=2)]) == (1, False)
        await reply(box, resident(0, pid=2), number, "b")
        for _ in range(2):
            assert await box.collect("slot", number, [0]) == {0: "b"}
            assert await box.join([resident(0, pid=3)]) == (1, True)
        await post(box, "slot", 2)
        await box.collect("slot", number, [0])
        assert await box.join([resident(0, pid=4)]) == (2, False)

    play(scene)


def test_who_joins_a_new_group_was_not_restarted_and_all_of_it_confirm() -> None:
    async def scene(box: Mailbox) -> tuple[dict[int, Any], int, list[int], bool]:
        await join(box, resident(0))
        await box.lose("slot", 1)
        await box.post("slot", 1, Regroup())
        collected = await waiting(box.collect("slot", 1, [0, 1]))
        for index in (0, 1):
            await box.join([resident(index, pid=9)])
            await box.receive([Message(resident(index, pid=9), 1, None)])
        closed = await box.is_closed("slot")
        status = await box.status("slot")
        return await collected, status.restarts, [*status.lost], closed

    assert play(scene) == ({0: None, 1: None}, 0, [], False)


def test_progress_is_that_of_the_resident_furthest_behind() -> None:
    async def scene(box: Mailbox) -> list[Progress | None]:
        await join(box, resident(0), resident(1))
        reports = [(await box.status("slot")).progress]
        await post(box, "slot", 1)
        await report(box, resident(0), 1, Progress(5, 10))
        await report(box, resident(1), 1, Progress(8, 20))
        reports.append((await box.status("slot")).progress)
        await report(box, resident(1), 1, Progress(15, 20))
        reports.append((await box.status("slot")).progress)
        await post(box, "slot", 2)
        return [*reports, (await box.status("slot")).progress]

    assert play(scene) == [None, Progress(8, 20), Progress(5, 10), None]


def test_nobody_waits_for_a_lost_resident() -> None:
    async def scene(box: Mailbox) -> dict[int, Any]:
        await box.join([resident(0)])
        joined = await waiting(box.residents("slot", 2))
        number = await post(box, "slot", 1)
        collected = await waiting(box.collect("slot", number, range(2)))
        await reply(box, resident(0), number, "a")
        await box.lose("slot", 1)
        assert await joined == [resident(0)]
        assert [*(await box.status("slot")).lost] == [1]
        assert await box.overdue("slot", range(2)) == []
        return await collected

    assert play(scene) == {0: "a"}


def test_the_resident_furthest_behind_comes_first_with_its_last_report() -> None:
    async def scene(box: Mailbox) -> None:
        await join(box, worker(0), worker(1))
        await post(box, "worker", 1)
        await report(box, worker(0), 1, Progress(5, 9))
        await report(box, worker(1), 1, Progress(3, 9))
        late = await box.overdue("worker", range(3))
        assert [overdue.index for overdue in late] == [2, 1, 0]
        assert [overdue.progress for overdue in late] == [None, Progress(3, 9), Progress(5, 9)]
        assert late[0].silent_s > late[2].silent_s >= late[1].silent_s >= 0

    play(scene)


def test_only_progress_ends_the_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("raytrain_opt.pools.mailbox.monotonic_s", lambda: now[0])

    async def scene(box: Mailbox) -> None:
        await join(box, worker(0))
        number = await post(box, "worker", 1)
        now[0] += 5
        assert (await box.status("worker")).silence_s == 5
        await report(box, worker(0), 1, Progress(1, 9))
        now[0] += 2
        await report(box, worker(0), 1, Progress(1, 9))
        assert (await box.status("worker")).silence_s == 2
        await report(box, worker(0), 1, Progress(2, 9))
        assert (await box.status("worker")).silence_s == 0
        now[0] += 3
        await reply(box, worker(0), number, "done")
        assert (await box.status("worker")).silence_s == 0
        now[0] += 4
        await box.join([worker(1)])
        assert (await box.status("worker")).silence_s == 0

    play(scene)


def test_a_group_that_restarted_with_fewer_workers_does_without_the_others() -> None:
    async def scene(box: Mailbox) -> list[int]:
        await box.join([worker(0), worker(1)])
        number = await post(box, "worker", 1)
        collected = await waiting(box.collect("worker", number, range(2)))
        await reply(box, worker(1), number, "with a group that has ended")
        await box.join([worker(0, pid=2)], absent=[1])
        status = await box.status("worker")
        assert (status.lost, status.restarts) == ({1}, 1)
        assert not collected.done()
        await reply(box, worker(1), number, "late")
        await reply(box, worker(0, pid=2), number, "alone")
        assert await collected == {0: "alone"}
        await box.join([worker(0, pid=3), worker(1, pid=3)])
        return [*(await box.status("worker")).lost]

    assert play(scene) == []


def test_the_first_rank_speaks_for_its_group() -> None:
    async def scene(box: Mailbox) -> None:
        group = [worker(0), worker(1)]
        await box.join(group)
        assert await box.residents("worker", 2) == group
        number = await post(box, "worker", 1)
        await box.receive([Message(w, number, Progress(w.index, 9)) for w in group])
        assert (await box.status("worker")).progress == Progress(0, 9)
        replies = [Message(w, number, w.index) for w in group]
        spoken = await waiting(box.exchange("worker", number, replies))
        assert await box.collect("worker", number, [0, 1]) == {0: 0, 1: 1}
        await box.post("worker", number + 1, Close())
        assert await spoken == (number + 1, Close())

    play(scene)


def test_a_report_that_a_later_one_has_overtaken_is_no_step_back() -> None:
    async def scene(box: Mailbox) -> None:
        await box.join([resident(1)])
        await post(box, "slot", 1)
        await report(box, resident(1), 1, Progress(4, 9))
        await report(box, resident(1), 1, Progress(0, 9))
        assert (await box.status("slot")).progress == Progress(4, 9)
        await box.join([resident(1, pid=2)])  # restarted: it begins anew
        await report(box, resident(1, pid=2), 1, Progress(0, 9))
        assert (await box.status("slot")).progress == Progress(0, 9)

    play(scene)


def test_a_restart_costs_the_time_since_the_last_sign_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("raytrain_opt.pools.mailbox.monotonic_s", lambda: now[0])

    async def scene(box: Mailbox) -> None:
        await box.join([resident(1)])
        await post(box, "slot", 1)
        now[0] += 3
        await report(box, resident(1), 1, Progress(1, 9))
        now[0] += 7
        await box.join([resident(1, pid=2)])
        now_s, [event] = await box.new_events("slot", 0)
        assert (await box.new_events("slot", 0)) == (now_s, [event])  # its answer was lost
        assert (await box.new_events("slot", 1)) == (now_s, [])
        assert isinstance(event, Event)
        assert (event.kind, event.process) == ("restarted", "slot 1")
        assert (event.time_s, event.silent_s) == (110, 7)
        assert event.text == "slot 1 was restarted during send_initial_state"

    play(scene)


def test_a_call_that_ray_repeats_after_a_cut_connection_has_its_effect_once() -> None:
    """The first attempt was executed, but its answer was lost."""

    async def scene(box: Mailbox) -> dict[int, Any]:
        for _ in range(2):
            await join(box, resident(0), resident(1))
        assert (await box.status("slot")).restarts == 0
        await post(box, "slot", 1)
        for _ in range(2):
            await reply(box, resident(0), 1, "first")
            await post(box, "slot", 1)
            await box.join([resident(0)])
        assert [overdue.index for overdue in await box.overdue("slot", range(2))] == [1]
        await reply(box, resident(1), 1, "second")
        return await box.collect("slot", 1, range(2))

    assert play(scene) == {0: "first", 1: "second"}


def test_a_command_that_arrives_again_after_a_later_one_is_dropped() -> None:
    async def scene(box: Mailbox) -> tuple[int, object]:
        await box.post("slot", 1, SendInitialState())
        await box.post("slot", 2, Close())
        await box.post("slot", 1, SendInitialState())
        return await box.exchange("slot", 0, [])

    assert play(scene) == (2, Close())


def test_late_messages_of_a_process_that_was_replaced_are_dropped() -> None:
    async def scene(box: Mailbox) -> dict[int, Any]:
        old, new = resident(0, pid=1), resident(0, pid=2)
        await join(box, old, resident(1))
        await post(box, "slot", 1)
        await box.join([new])
        await report(box, old, 1, Progress(7, 9))
        await reply(box, old, 1, "with a state that died with it")
        assert (await box.status("slot")).progress is None
        await reply(box, resident(1), 1, "b")
        collected = await waiting(box.collect("slot", 1, range(2)))
        await reply(box, new, 1, "a")
        return await collected

    assert play(scene) == {0: "a", 1: "b"}
