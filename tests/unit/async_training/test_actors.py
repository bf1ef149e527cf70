"""The coordinator and the shards as their actors run them: who waits, and what is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from raytrain_opt.async_training.actors import ServerHandles, SspCoordinator, WeightShardActor
from raytrain_opt.async_training.scheduler import EpochPhase, MicroBatchDone
from raytrain_opt.async_training.weight_shard import to_wire
from raytrain_opt.async_training.worker import PhaseLostError, RemoteServer
from raytrain_opt.data.base import DataInfo
from raytrain_opt.results import Steps
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from tests.support.small_jobs import small_job

PHASE = EpochPhase("1.4", 1, Steps(0, (0.1,) * 4), micro_batches=2, bound=1)


def run(test: Callable[[SspCoordinator], Awaitable[None]], phase: EpochPhase = PHASE) -> None:
    async def run_test() -> None:
        coordinator = SspCoordinator()
        await coordinator.begin(phase)
        await asyncio.wait_for(test(coordinator), 10)

    asyncio.run(run_test())


def done(number: int) -> MicroBatchDone:
    return MicroBatchDone(number, 1.0, 8, 0)


async def train_worker(
    coordinator: SspCoordinator, worker: int, phase: EpochPhase = PHASE
) -> list[int]:
    """Train as a worker until no work is left; return the micro-batches that it computed."""
    computed = []
    requests = count(1)
    while True:
        while (number := await coordinator.claim(phase.id, worker, next(requests))) is not None:
            version = 0
            while not await coordinator.begin_micro_batch(phase.id, worker, number, version):
                version += 1
            await asyncio.sleep(0)
            await coordinator.done(phase.id, worker, done(number))
            computed.append(number)
        if not await coordinator.wait_for_work(phase.id, worker):
            return computed


def test_workers_divide_an_epoch() -> None:
    async def test(coordinator: SspCoordinator) -> None:
        computed = await asyncio.gather(train_worker(coordinator, 0), train_worker(coordinator, 1))
        assert sorted(computed[0] + computed[1]) == list(range(8))
        finished, totals, staleness = await coordinator.result()
        assert finished
        assert totals.samples == 64
        assert staleness.total() == 8

    run(test)


def test_the_micro_batch_of_a_worker_that_left_is_computed_by_another() -> None:
    async def test(coordinator: SspCoordinator) -> None:
        number = await coordinator.claim(PHASE.id, 0, 1)
        assert number == 0
        assert await coordinator.begin_micro_batch(PHASE.id, 0, number, 0)
        other = asyncio.create_task(train_worker(coordinator, 1))
        await asyncio.sleep(0.05)
        assert not other.done()
        await coordinator.leave(0)
        assert sorted(await other) == list(range(8))

    run(test)


def test_a_call_that_ray_repeats_after_a_cut_connection_has_its_effect_once() -> None:
    async def test(coordinator: SspCoordinator) -> None:
        for number in range(2):
            for _ in range(2):
                assert await coordinator.claim(PHASE.id, 0, number + 1) == number
                assert await coordinator.begin_micro_batch(PHASE.id, 0, number, 0)
        for _ in range(2):
            await coordinator.done(PHASE.id, 0, done(1))
        _, totals, _ = await coordinator.result()
        assert totals.samples == 8
        await coordinator.leave(0)  # restarted: it numbers its requests anew
        claimed = [await coordinator.claim(PHASE.id, 0, request) for request in range(1, 9)]
        assert claimed == [0, 2, 3, 4, 5, 6, 7, None]

    run(test)


def test_messages_about_another_phase_change_nothing() -> None:
    async def test(coordinator: SspCoordinator) -> None:
        assert await coordinator.claim("0.9", 0, 1) is None
        assert await coordinator.begin_micro_batch("0.9", 0, 0, 0)
        await coordinator.done("0.9", 0, done(0))
        assert not await coordinator.wait_for_work("0.9", 0)
        _, totals, _ = await coordinator.result()
        assert totals.samples == 0

    run(test)


@pytest.mark.parametrize("waits_for", ["work", "the bound"])
def test_an_aborted_phase_lets_nobody_wait(waits_for: str) -> None:
    """Its shards lost their weights; then it begins again."""

    async def test(coordinator: SspCoordinator) -> None:
        for number in range(8 if waits_for == "work" else 3):
            await coordinator.claim(PHASE.id, 0, number + 1)
        for number in range(2):  # the bound is 1
            await coordinator.begin_micro_batch(PHASE.id, 0, number, 0)
        waiting = asyncio.create_task(
            coordinator.wait_for_work(PHASE.id, 1)
            if waits_for == "work"
            else coordinator.begin_micro_batch(PHASE.id, 0, 2, 0)
        )
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await coordinator.abort("0.9")
        assert await coordinator.result() is not None
        await coordinator.abort(PHASE.id)
        assert await waiting == (waits_for == "the bound")
        assert await coordinator.result() is None
        assert await coordinator.claim(PHASE.id, 1, 1) is None
        await coordinator.leave(0)
        await coordinator.begin(PHASE)
        assert await train_worker(coordinator, 1) == [*range(8)]

    run(test)


INFO = DataInfo(10, (1, 8, 8), 64, 64, 0, 0)


class Remote:
    """Calls an actor's methods at once; `ray.get` returns what they returned."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            result = getattr(self.actor, name)(*args)
            return asyncio.run(result) if asyncio.iscoroutine(result) else result

        return SimpleNamespace(remote=call)


def test_a_shard_that_died_aborts_the_phase_and_loads_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("get", "put"):
        monkeypatch.setattr(ray, name, lambda value: value)
    config = LearnerConfig.from_job(small_job(tmp_path, parallel={"mode": "async"}))
    state = [Learner(config, None, torch.device("cpu")).state(copy=True)]

    def shards() -> list[Remote]:
        return [Remote(WeightShardActor(config, INFO, i, 2)) for i in range(2)]

    handles = ServerHandles(Remote(SspCoordinator()), shards())
    server = RemoteServer(handles, PHASE.id, 0, torch.float32)
    begin, load = handles.coordinator.begin.remote, lambda shard: shard.actor.load(PHASE, state)
    begin(PHASE)
    for shard in handles.shards:
        load(shard)
    number, weights = server.claim(), server.pull()
    assert number == weights.version == 0
    gradients = [to_wire(part, torch.float32) for part in weights.parts]
    handles.shards[1] = shards()[1]
    with pytest.raises(PhaseLostError):
        server.push(number, weights.version, gradients)
    assert server.claim() is None
    with pytest.raises(PhaseLostError):
        server.pull()
    begin(PHASE)
    for shard in handles.shards:
        assert shard is handles.shards[0] or shard.actor.collect(PHASE.id) is None
        load(shard)
    assert server.claim() == 0
    assert server.push(0, 0, gradients) == 0
    assert server.pull().version == 1
