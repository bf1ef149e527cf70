"""The coordinator and the shards as their actors run them: who waits, and who is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch

from raytrain_opt.async_training import actors
from raytrain_opt.async_training.actors import Recovery, SspCoordinator, WeightShardActor
from raytrain_opt.async_training.scheduler import EpochPhase, MicroBatchDone
from raytrain_opt.async_training.weight_shard import from_wire
from raytrain_opt.data.base import DataInfo
from raytrain_opt.results import Steps
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from tests.support.small_jobs import small_job

PHASE = EpochPhase("1.4", 1, Steps(0, (0.1,) * 4), micro_batches=2, bound=1)


OLD, NEW = b"old", b"new"


def run(test: Callable[[SspCoordinator], Awaitable[None]], phase: EpochPhase = PHASE) -> None:
    async def run_test() -> None:
        coordinator = SspCoordinator()
        await coordinator.begin(phase, [], [])
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
        assert sum(staleness.counts) == 8

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
        assert sorted(n % 8 for n in await other) == list(range(8))

    run(test)


def test_a_micro_batch_that_shards_are_dropping_does_not_count_as_done() -> None:
    """The worker, which was only slow, reports it while its loss is told to the shards."""

    async def test(coordinator: SspCoordinator) -> None:
        async def drop(phase: str, numbers: set[int]) -> None:
            assert (phase, numbers) == (PHASE.id, {0})
            await coordinator.done(PHASE.id, 0, done(0))

        await coordinator.begin(PHASE, [SimpleNamespace(drop=SimpleNamespace(remote=drop))], [])
        number = await coordinator.claim(PHASE.id, 0, 1)
        await coordinator.begin_micro_batch(PHASE.id, 0, 0, 0)
        await coordinator.leave(0)
        _, totals, _ = await coordinator.result()
        assert (number, totals.samples) == (0, 0)

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
                assert await coordinator.begin_micro_batch(PHASE.id, 0, number, 0)
        for _ in range(2):
            await coordinator.done(PHASE.id, 0, done(1))
        _, totals, _ = await coordinator.result()
        assert totals.samples == 8
        await coordinator.keep(PHASE.id, 0, 2, NEW)
        await coordinator.keep(PHASE.id, 0, 1, OLD)
        recovery = await coordinator.recover(0)
        assert recovery == Recovery(PHASE, {1}, set(), NEW, [])
        await coordinator.leave(0)  # restarted: it numbers its requests anew
        claimed = [await coordinator.claim(PHASE.id, 0, request) for request in range(1, 9)]
        assert claimed == [2, 3, 4, 5, 6, 7, 8, None]  # 8: the first micro-batch again

    run(test)


def test_the_coordinator_is_on_the_drivers_node_and_its_calls_are_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is not restarted: the failure of another node must not end it."""
    started: list[tuple[type[Any], dict[str, Any]]] = []

    def remote(kind: type[Any]) -> Any:
        def options(**values: Any) -> Any:
            started.append((kind, values))
            return SimpleNamespace(remote=lambda *_: None)

        return SimpleNamespace(options=options)

    monkeypatch.setattr(ray, "remote", remote)
    monkeypatch.setattr(ray, "kill", lambda _: None)
    monkeypatch.setattr(actors, "on_driver_node", lambda: {"ray.io/node-id": "head"})
    config = LearnerConfig.from_job(small_job(tmp_path, parallel={"mode": "async"}))
    with actors.parameter_server(config, INFO, 3, shards=1):
        pass
    coordinator, shard = started
    assert (coordinator[0], shard[0]) == (SspCoordinator, WeightShardActor)
    assert coordinator[1]["label_selector"] == {"ray.io/node-id": "head"}
    assert coordinator[1]["max_task_retries"] == shard[1]["max_task_retries"] == -1


def test_messages_about_another_phase_change_nothing() -> None:
    async def test(coordinator: SspCoordinator) -> None:
        assert await coordinator.claim("0.9", 0, 1) is None
        assert await coordinator.begin_micro_batch("0.9", 0, 0, 0)
        await coordinator.done("0.9", 0, done(0))
        assert not await coordinator.wait_for_work("0.9", 0)
        _, totals, _ = await coordinator.result()
        assert totals.samples == 0

    run(test)


def test_a_restarted_shard_gets_its_latest_snapshot_of_the_phase() -> None:
    async def test(coordinator: SspCoordinator) -> None:
        await coordinator.keep("0.9", 1, 2, OLD)
        assert await coordinator.recover(1) == Recovery(PHASE, set(), set(), None, [])
        await coordinator.keep(PHASE.id, 1, 2, NEW)
        assert await coordinator.recover(1) == Recovery(PHASE, set(), set(), NEW, [])
        assert await coordinator.recover(0) == Recovery(PHASE, set(), set(), None, [])
        later = EpochPhase("2.4", 2, Steps(0, (0.1,) * 4), micro_batches=2, bound=0)
        await coordinator.begin(later, [], [])
        assert await coordinator.recover(1) == Recovery(later, set(), set(), None, [])

    run(test)


def test_before_the_first_phase_there_is_nothing_to_recover() -> None:
    async def test() -> None:
        assert await SspCoordinator().recover(0) is None
        await SspCoordinator().leave(3)

    asyncio.run(test())


INFO = DataInfo(10, (1, 8, 8), 64, 64, 0, 0)


@dataclass
class Cluster:
    """A coordinator and its shards in this process; `ray.get` returns what calls returned."""

    config: LearnerConfig
    coordinator: SspCoordinator = field(default_factory=SspCoordinator)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.coordinator, name)
        return SimpleNamespace(remote=lambda *args: self.loop.run_until_complete(method(*args)))

    def shard(self) -> WeightShardActor:
        return WeightShardActor(self.config, INFO, 0, 1, "coordinator")


class Handle:
    """A shard as the coordinator calls it."""

    def __init__(self, shard: WeightShardActor) -> None:
        self._shard = shard

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            return getattr(self._shard, name)(*args)

        return SimpleNamespace(remote=call)


@pytest.fixture
def make_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[], Cluster]]:
    opened = []

    def make() -> Cluster:
        job = small_job(tmp_path, parallel={"mode": "async"})
        opened.append(Cluster(LearnerConfig.from_job(job)))
        monkeypatch.setattr(ray, "get_actor", lambda _: opened[-1])
        monkeypatch.setattr(ray, "get", lambda value: value)
        return opened[-1]

    yield make
    for cluster in opened:
        for task in (tasks := asyncio.all_tasks(cluster.loop)):
            task.cancel()
        cluster.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        cluster.loop.close()


def begin(cluster: Cluster, phase: EpochPhase, shard: WeightShardActor) -> np.ndarray[Any, Any]:
    """Begin a phase; return a gradient."""
    state = Learner(cluster.config, None, torch.device("cpu")).state(copy=True)
    cluster.begin.remote(phase, [Handle(shard)], [state])
    shard.load(phase, [state])
    _, weights = shard.pull()
    return from_wire(weights, torch.float32).numpy().view(np.uint8)


@pytest.mark.parametrize(("snapshot_every", "lost_updates"), [(2, 1), (100, 3)])
def test_a_restarted_shard_continues_from_its_snapshot_at_the_current_version(
    make_cluster: Callable[[], Cluster],
    monkeypatch: pytest.MonkeyPatch,
    snapshot_every: int,
    lost_updates: int,
) -> None:
    """The shard dies after three of four updates; its weights have those up to the snapshot."""
    monkeypatch.setattr(actors, "_SNAPSHOT_EVERY", snapshot_every)
    cluster = make_cluster()
    phase = EpochPhase("1.4", 1, Steps(0, (0.1,) * 4), micro_batches=1, bound=None)
    first = cluster.shard()
    gradient = begin(cluster, phase, first)
    shard = first
    for number in range(4):
        cluster.claim.remote(phase.id, 0, number + 1)
        cluster.begin_micro_batch.remote(phase.id, 0, number, number)
        if number == 3:
            shard = cluster.shard()  # the first is dead
            assert shard.pull()[0] == 3
        shard.apply(phase.id, number, number, gradient)
        cluster.done.remote(phase.id, 0, done(number))
    state, lost = shard.collect()
    assert lost == lost_updates
    kept = cluster.shard()
    begin(cluster, phase, kept)
    for number in [*range(3 - lost_updates), 3]:
        kept.apply(phase.id, number, number, gradient)
    assert kept.collect()[0].digest() == state.digest()


@pytest.mark.parametrize("applied", ["before", "after"])
def test_a_shard_that_dies_before_an_update_is_done_counts_it_as_lost_unless_it_applies_it(
    make_cluster: Callable[[], Cluster], applied: str
) -> None:
    """The worker waits for another shard meanwhile; it must not wait for newer weights then."""
    cluster = make_cluster()
    phase = EpochPhase("1.4", 1, Steps(0, (0.1,) * 4), micro_batches=1, bound=0)
    shard = cluster.shard()
    gradient = begin(cluster, phase, shard)
    [handle] = cluster.coordinator._shards
    cluster.claim.remote(phase.id, 0, 1)
    cluster.begin_micro_batch.remote(phase.id, 0, 0, 0)
    if applied == "before":
        shard.apply(phase.id, 0, 0, gradient)
    handle._shard = shard = cluster.shard()
    if applied == "after":
        shard.apply(phase.id, 0, 0, gradient)
    for _ in range(2):  # Ray may repeat a call
        cluster.done.remote(phase.id, 0, done(0))
    assert shard.collect()[1] == (applied == "before")
    version, _ = shard.pull()
    cluster.claim.remote(phase.id, 0, 2)
    assert cluster.begin_micro_batch.remote(phase.id, 0, 1, version)


def test_a_late_gradient_of_a_worker_that_was_taken_for_dead_changes_no_weight(
    make_cluster: Callable[[], Cluster],
) -> None:
    """Whether before or after that of the worker in its place, or at a shard that restarted."""
    cluster = make_cluster()
    phase = EpochPhase("1.2", 1, Steps(0, (0.1,) * 2), micro_batches=1, bound=None)

    def trained(late: str) -> str:
        shard = cluster.shard()
        gradient = begin(cluster, phase, shard)
        first = cluster.claim.remote(phase.id, 0, 1)
        cluster.begin_micro_batch.remote(phase.id, 0, first, 0)
        cluster.leave.remote(0)
        if late == "restarted":
            shard = cluster.shard()
        for request in (1, 2):
            number = cluster.claim.remote(phase.id, 1, request)
            cluster.begin_micro_batch.remote(phase.id, 1, number, 0)
            if late in ("before", "restarted"):
                shard.apply(phase.id, first, 0, np.zeros_like(gradient))
            shard.apply(phase.id, number, 0, gradient)
            if late == "after":
                shard.apply(phase.id, first, 0, np.zeros_like(gradient))
            cluster.done.remote(phase.id, 1, done(number))
        return shard.collect()[0].digest()

    assert trained("before") == trained("after") == trained("restarted") == trained("never")
