"""The parameter server's clock as its actor runs it: who waits for whom, and who is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from small_jobs import small_job

from raytrain_opt.data.base import DataInfo
from raytrain_opt.pools import shards
from raytrain_opt.pools.shards import Clock, ShardHolder, Snapshot
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.parameter_server import from_wire
from raytrain_opt.train.share_clock import Done, Phase, Update

PHASE = Phase("1.4", 1, 0, (0.1,) * 4, shares=2, bound=0, in_order=True)


OLD: Snapshot = ({}, {"age": 1})
NEW: Snapshot = ({}, {"age": 2})


def run(test: Callable[[Clock], Awaitable[None]], phase: Phase = PHASE) -> None:
    async def begun() -> None:
        clock = Clock()
        await clock.begin(phase, [], [])
        await asyncio.wait_for(test(clock), 10)

    asyncio.run(begun())


def done(share: int) -> Done:
    return Done(share, 1.0, 8, 4, 0)


async def works(clock: Clock, worker: int, phase: Phase = PHASE) -> list[int]:
    """A worker's life; the shares that it computed."""
    computed = []
    while True:
        while (share := await clock.claim(phase.id, worker)) is not None:
            version = 0
            while (
                needed := await clock.begin_share(phase.id, worker, share, version)
            ) is not None:
                version = needed
            await asyncio.sleep(0)
            await clock.done(phase.id, worker, done(share))
            computed.append(share)
        if not await clock.wait_for_work(phase.id, worker):
            return computed


def test_workers_share_an_epoch() -> None:
    async def test(clock: Clock) -> None:
        computed = await asyncio.gather(works(clock, 0), works(clock, 1))
        assert sorted(computed[0] + computed[1]) == list(range(8))
        finished, totals, staleness = await clock.result()
        assert finished
        assert (totals.samples, totals.correct) == (64, 32)
        assert staleness.counts == (8,)

    run(test)


def test_what_a_worker_that_left_had_is_waited_for_and_done_by_another() -> None:
    async def test(clock: Clock) -> None:
        share = await clock.claim(PHASE.id, 0)
        assert share == 0
        assert await clock.begin_share(PHASE.id, 0, share, 0) is None
        other = asyncio.create_task(works(clock, 1))
        await asyncio.sleep(0.05)
        assert not other.done()  # the first step misses a share
        await clock.leave(0)
        assert sorted(await other) == list(range(8))

    run(test)


def test_a_silent_worker_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(shards, "monotonic_s", lambda: now_s[0])
    monkeypatch.setattr(shards, "_WATCH_S", 0.01)

    async def test(clock: Clock) -> None:
        share = await clock.claim(PHASE.id, 0)
        assert share is not None
        await clock.begin_share(PHASE.id, 0, share, 0)
        other = asyncio.create_task(works(clock, 1))
        await asyncio.sleep(0.05)
        assert not other.done()
        now_s[0] = 1000.0
        assert sorted(await other) == list(range(8))
        await clock.done(PHASE.id, 0, done(share))  # it was alive after all
        _, totals, _ = await clock.result()
        assert totals.samples == 64

    run(test)


def test_messages_about_another_phase_change_nothing() -> None:
    async def test(clock: Clock) -> None:
        assert await clock.claim("0.9", 0) is None
        assert await clock.begin_share("0.9", 0, 0, 0) is None
        await clock.done("0.9", 0, done(0))
        assert not await clock.wait_for_work("0.9", 0)
        _, totals, _ = await clock.result()
        assert totals.samples == 0

    run(test)


def test_a_shard_that_comes_back_gets_its_latest_snapshot_of_this_phase() -> None:
    async def test(clock: Clock) -> None:
        await clock.keep("0.9", 1, 2, OLD)
        assert await clock.recover(1) == (PHASE, 0, None, [])
        await clock.keep(PHASE.id, 1, 2, NEW)
        assert await clock.recover(1) == (PHASE, 0, (2, NEW), [])
        assert await clock.recover(0) == (PHASE, 0, None, [])
        later = Phase("2.4", 2, 0, (0.1,) * 4, shares=2, bound=0)
        await clock.begin(later, [], [])
        assert await clock.recover(1) == (later, 0, None, [])

    run(test)


def test_before_the_first_phase_there_is_nothing_to_go_on_from() -> None:
    async def test() -> None:
        assert await Clock().recover(0) is None
        await Clock().leave(3)

    asyncio.run(test())


class Handle:
    """An actor in this event loop."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(method(*args)))


INFO = DataInfo(10, (1, 8, 8), 64, 0, 0)


@pytest.mark.parametrize(("snapshot_every", "lost_updates"), [(2, 1), (100, 3)])
def test_a_shard_that_died_goes_on_from_its_snapshot_at_the_version_of_now(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, snapshot_every: int, lost_updates: int
) -> None:
    """It dies after three of four updates, with the gradients of the fourth; what is left is what
    the updates before the snapshot came to.
    """
    parallel = {"mode": "async", "staleness_bound": None, "snapshot_every": snapshot_every}
    job = small_job(tmp_path, parallel=parallel)
    phase = Phase("1.4", 1, 0, (0.1,) * 4, shares=1, bound=None)

    async def test() -> None:
        state = asyncio.get_running_loop().create_future()
        state.set_result(Learner(job, None, torch.device("cpu")).state(copy=True))
        clock = Clock()
        monkeypatch.setattr(ray, "get_actor", lambda _: Handle(clock))
        first, second = (ShardHolder(job, INFO, 0, 1, "clock") for _ in range(2))
        handles: list[Any] = [Handle(first)]
        await clock.begin(phase, handles, [state])
        await first.load(phase, [state])
        _, weights = await first.pull(0)
        gradient = from_wire(weights, torch.float32).numpy().view(np.uint8)
        for share in range(4):
            await clock.claim(phase.id, 0)
            await clock.begin_share(phase.id, 0, share, share)
            await first.add(phase.id, share, gradient)
            if share == 3:
                handles[0] = Handle(second)  # the first is dead
                assert (await second.pull(3))[0] == 3
            await clock.done(phase.id, 0, done(share))
            await handles[0].collect.remote(share + 1)
        found, lost_gradients, lost = await second.collect(4)
        assert (lost_gradients, lost) == (1, lost_updates)
        kept = ShardHolder(job, INFO, 0, 1, "clock")
        await clock.begin(phase, [Handle(kept)], [state])
        await kept.load(phase, [state])
        for number in range(3 - lost_updates):
            await kept.add(phase.id, number, gradient)
            await kept.apply(Update(phase.id, number, 0.1, ((number, 1.0),)))
        # The lost gradient counts as none at all: momentum and decay go on.
        await kept.apply(Update(phase.id, 3, 0.1, ()))
        assert (await kept.collect(4))[0].digest() == found.digest()

    asyncio.run(asyncio.wait_for(test(), 60))
