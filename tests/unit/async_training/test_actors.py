"""The coordinator and the shards as their actors run them: who waits, and who is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch

from raytrain_opt.async_training import actors
from raytrain_opt.async_training.actors import Snapshot, SspCoordinator, WeightShardActor
from raytrain_opt.async_training.scheduler import EpochPhase, MicroBatchDone, Update
from raytrain_opt.async_training.weight_shard import from_wire
from raytrain_opt.data.base import DataInfo
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from tests.support.small_jobs import small_job

PHASE = EpochPhase("1.4", 1, 0, (0.1,) * 4, micro_batches=2, bound=0, in_order=True)


OLD: Snapshot = ({}, {"age": 1})
NEW: Snapshot = ({}, {"age": 2})


def run(test: Callable[[SspCoordinator], Awaitable[None]], phase: EpochPhase = PHASE) -> None:
    async def run_test() -> None:
        coordinator = SspCoordinator()
        await coordinator.begin(phase, [], [])
        await asyncio.wait_for(test(coordinator), 10)

    asyncio.run(run_test())


def done(number: int) -> MicroBatchDone:
    return MicroBatchDone(number, 1.0, 8, 4, 0)


async def train_worker(
    coordinator: SspCoordinator, worker: int, phase: EpochPhase = PHASE
) -> list[int]:
    """Train as a worker until no work is left; return the micro-batches that it computed."""
    computed = []
    requests = count(1)
    while True:
        while (number := await coordinator.claim(phase.id, worker, next(requests))) is not None:
            version = 0
            while (
                needed_version := await coordinator.begin_micro_batch(
                    phase.id, worker, number, version
                )
            ) is not None:
                version = needed_version
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
        assert (totals.samples, totals.correct) == (64, 32)
        assert staleness.counts == (8,)

    run(test)


def test_the_micro_batch_of_a_worker_that_left_is_computed_by_another() -> None:
    async def test(coordinator: SspCoordinator) -> None:
        number = await coordinator.claim(PHASE.id, 0, 1)
        assert number == 0
        assert await coordinator.begin_micro_batch(PHASE.id, 0, number, 0) is None
        other = asyncio.create_task(train_worker(coordinator, 1))
        await asyncio.sleep(0.05)
        assert not other.done()  # the first step misses a number
        await coordinator.leave(0)
        assert sorted(n % 8 for n in await other) == list(range(8))

    run(test)


def test_a_silent_worker_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(actors, "monotonic_s", lambda: now_s[0])
    monkeypatch.setattr(actors, "_WATCH_INTERVAL_S", 0.01)

    async def test(coordinator: SspCoordinator) -> None:
        number = await coordinator.claim(PHASE.id, 0, 1)
        assert number is not None
        await coordinator.begin_micro_batch(PHASE.id, 0, number, 0)
        other = asyncio.create_task(train_worker(coordinator, 1))
        await asyncio.sleep(0.05)
        assert not other.done()
        now_s[0] = 1000.0
        assert sorted(n % 8 for n in await other) == list(range(8))
        await coordinator.done(PHASE.id, 0, done(number))  # it was alive after all
        _, totals, _ = await coordinator.result()
        assert totals.samples == 64

    run(test)


def test_a_call_that_ray_repeats_after_a_cut_connection_has_its_effect_once() -> None:
    async def test(coordinator: SspCoordinator) -> None:
        for number in range(2):
            for _ in range(2):
                assert await coordinator.claim(PHASE.id, 0, number + 1) == number
                assert await coordinator.begin_micro_batch(PHASE.id, 0, number, 0) is None
        for _ in range(2):
            await coordinator.done(PHASE.id, 0, done(1))
        _, totals, _ = await coordinator.result()
        assert totals.samples == 8
        await coordinator.keep(PHASE.id, 0, 2, NEW)
        await coordinator.keep(PHASE.id, 0, 1, OLD)
        recovery = await coordinator.recover(0)
        assert recovery is not None
        assert recovery[2] == (2, NEW)
        await coordinator.leave(0)  # restarted: it numbers its requests anew
        assert await coordinator.claim(PHASE.id, 0, 1) == 8  # the first micro-batch again

    run(test)


def test_the_coordinator_is_on_the_drivers_node_and_its_calls_are_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is not restarted: the failure of another node must not end it."""
    started: list[tuple[type[Any], dict[str, Any]]] = []

    def remote(kind: type[Any]) -> Any:
        def options(**values: Any) -> Any:
            started.append((kind, values))
            actor = SimpleNamespace(prepare=SimpleNamespace(remote=lambda: None))
            return SimpleNamespace(remote=lambda *_: actor)

        return SimpleNamespace(options=options)

    monkeypatch.setattr(ray, "remote", remote)
    monkeypatch.setattr(ray, "kill", lambda _: None)
    monkeypatch.setattr(actors, "on_driver_node", lambda: {"ray.io/node-id": "head"})
    config = LearnerConfig.from_job(small_job(tmp_path, parallel={"mode": "async", "shards": 1}))
    with actors.parameter_server(config, INFO, 3):
        pass
    coordinator, shard = started
    assert (coordinator[0], shard[0]) == (SspCoordinator, WeightShardActor)
    assert coordinator[1]["label_selector"] == {"ray.io/node-id": "head"}
    assert coordinator[1]["max_task_retries"] == shard[1]["max_task_retries"] == -1


def test_messages_about_another_phase_change_nothing() -> None:
    async def test(coordinator: SspCoordinator) -> None:
        assert await coordinator.claim("0.9", 0, 1) is None
        assert await coordinator.begin_micro_batch("0.9", 0, 0, 0) is None
        await coordinator.done("0.9", 0, done(0))
        assert not await coordinator.wait_for_work("0.9", 0)
        _, totals, _ = await coordinator.result()
        assert totals.samples == 0

    run(test)


def test_a_restarted_shard_gets_its_latest_snapshot_of_the_phase() -> None:
    async def test(coordinator: SspCoordinator) -> None:
        await coordinator.keep("0.9", 1, 2, OLD)
        assert await coordinator.recover(1) == (PHASE, 0, None, [])
        await coordinator.keep(PHASE.id, 1, 2, NEW)
        assert await coordinator.recover(1) == (PHASE, 0, (2, NEW), [])
        assert await coordinator.recover(0) == (PHASE, 0, None, [])
        later = EpochPhase("2.4", 2, 0, (0.1,) * 4, micro_batches=2, bound=0)
        await coordinator.begin(later, [], [])
        assert await coordinator.recover(1) == (later, 0, None, [])

    run(test)


def test_before_the_first_phase_there_is_nothing_to_recover() -> None:
    async def test() -> None:
        assert await SspCoordinator().recover(0) is None
        await SspCoordinator().leave(3)

    asyncio.run(test())


class Handle:
    """An actor in this event loop."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(method(*args)))


INFO = DataInfo(10, (1, 8, 8), 64, 64, 0, 0)


@pytest.mark.parametrize(("snapshot_every", "lost_updates"), [(2, 1), (100, 3)])
def test_a_restarted_shard_continues_from_its_snapshot_at_the_current_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, snapshot_every: int, lost_updates: int
) -> None:
    """The shard dies after three of four updates, with the gradients of the fourth.

    Its weights have only the updates up to the snapshot.
    """
    parallel = {"mode": "async", "staleness_bound": None, "snapshot_every": snapshot_every}
    config = LearnerConfig.from_job(small_job(tmp_path, parallel=parallel))
    phase = EpochPhase("1.4", 1, 0, (0.1,) * 4, micro_batches=1, bound=None)

    async def test() -> None:
        state = asyncio.get_running_loop().create_future()
        state.set_result(Learner(config, None, torch.device("cpu")).state(copy=True))
        coordinator = SspCoordinator()
        monkeypatch.setattr(ray, "get_actor", lambda _: Handle(coordinator))
        first, second = (WeightShardActor(config, INFO, 0, 1, "coordinator") for _ in range(2))
        handles: list[Any] = [Handle(first)]
        await coordinator.begin(phase, handles, [state])
        await first.load(phase, [state])
        _, weights = await first.pull(0)
        gradient = from_wire(weights, torch.float32).numpy().view(np.uint8)
        for number in range(4):
            await coordinator.claim(phase.id, 0, number + 1)
            await coordinator.begin_micro_batch(phase.id, 0, number, number)
            await first.add(phase.id, number, gradient)
            if number == 3:
                handles[0] = Handle(second)  # the first is dead
                assert (await second.pull(3))[0] == 3
            await coordinator.done(phase.id, 0, done(number))
            await handles[0].collect.remote(number + 1)
        found, lost_gradients, lost = await second.collect(4)
        assert (lost_gradients, lost) == (1, lost_updates)
        kept = WeightShardActor(config, INFO, 0, 1, "coordinator")
        await coordinator.begin(phase, [Handle(kept)], [state])
        await kept.load(phase, [state])
        for number in range(3 - lost_updates):
            await kept.add(phase.id, number, gradient)
            await kept.apply(Update(phase.id, number, 0.1, ((number, 1.0),)))
        # The lost gradient counts as none at all: momentum and decay go on.
        await kept.apply(Update(phase.id, 3, 0.1, ()))
        assert (await kept.collect(4))[0].digest() == found.digest()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_late_gradient_of_a_worker_that_was_taken_for_dead_changes_no_weight(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It arrives after that of the worker which computed the micro-batch anew."""
    config = LearnerConfig.from_job(small_job(tmp_path, parallel={"mode": "async"}))
    phase = EpochPhase("1.2", 1, 0, (0.1,) * 2, micro_batches=1, bound=None)

    async def trained(*, late: bool) -> str:
        state = asyncio.get_running_loop().create_future()
        state.set_result(Learner(config, None, torch.device("cpu")).state(copy=True))
        coordinator = SspCoordinator()
        monkeypatch.setattr(ray, "get_actor", lambda _: Handle(coordinator))
        shard = WeightShardActor(config, INFO, 0, 1, "coordinator")
        await coordinator.begin(phase, [Handle(shard)], [state])
        await shard.load(phase, [state])
        _, weights = await shard.pull(0)
        gradient = from_wire(weights, torch.float32).numpy().view(np.uint8)
        first = await coordinator.claim(phase.id, 0, 1)
        assert first is not None
        await coordinator.begin_micro_batch(phase.id, 0, first, 0)
        await coordinator.leave(0)
        for request in (1, 2):
            number = await coordinator.claim(phase.id, 1, request)
            assert number is not None
            await coordinator.begin_micro_batch(phase.id, 1, number, 0)
            await shard.add(phase.id, number, gradient)
            if late:
                await shard.add(phase.id, first, np.zeros_like(gradient))
            await coordinator.done(phase.id, 1, done(number))
            await shard.pull(request)
        return (await shard.collect(2))[0].digest()

    async def test() -> None:
        assert await trained(late=True) == await trained(late=False)

    asyncio.run(asyncio.wait_for(test(), 60))
