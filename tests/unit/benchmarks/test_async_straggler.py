"""The benchmark's simulated clock and network, and its trainings."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.async_environments import ENVIRONMENTS, WAYS, Environment
from benchmarks.async_processes import (
    MICRO_BATCH_SAMPLES,
    FastestGradients,
    Sleeper,
    job_of,
    simulated_steps_s,
)
from benchmarks.async_simulation import Costs, Network
from benchmarks.async_straggler import efficiency
from benchmarks.async_training import Training, table, train
from benchmarks.comparison_tasks import SYNTHETIC
from raytrain_opt.async_training.scheduler import EpochPhase
from raytrain_opt.async_training.weight_shard import split_parameters
from raytrain_opt.async_training.worker_loop import AsyncTrainer


def test_ways_are_as_fast_as_arithmetic_says() -> None:
    slow = Environment("slow", 4, slower=4.0)
    expected = {"sync": 1 / 4, "without slow": 3 / 4, "backup": 1.0, "balanced": 0.8}
    for way, speed in expected.items():
        assert slow.speed(way) == pytest.approx(speed, rel=0.06)
    assert slow.speed("async") == pytest.approx(3.25 / 4, rel=0.06)
    assert Environment("equal", 4).speed("async") == pytest.approx(1.0, rel=0.06)


def happen(link: Network, *starts: Callable[[Callable[[float], None]], None]) -> list[float]:
    """Return when what is started ends, in this order."""
    times: dict[int, float] = {}
    for number, start in enumerate(starts):
        start(partial(times.__setitem__, number))
    while len(times) < len(starts):
        link.clock.step()
    return [times[number] for number in range(len(starts))]


def test_a_link_carries_no_more_than_it_can() -> None:
    link = Network(2, 1, weight_bytes=100.0, gradient_bytes=100.0, bytes_per_s=50.0)
    assert happen(
        link,
        partial(link.pull, 0, 0, 1.0),  # the shard is on its node
        partial(link.pull, 1, 0, 1.0),
        partial(link.pull, 3, 0, 1.5),  # its node has this version
        partial(link.pull, 1, 1, 1.0),
        partial(link.push, 1, 1.0),
        partial(link.push, 1, 1.0),
    ) == [1.0, 3.0, 3.0, 5.0, 3.0, 5.0]


def test_a_shard_makes_one_update_after_the_other() -> None:
    costs = Costs(update_s=0.5, publish_s=0.25, call_s=1.0)
    link = Network(1, 2, weight_bytes=8.0, gradient_bytes=8.0, bytes_per_s=1.0, costs=costs)
    assert happen(
        link,
        partial(link.pull, 0, 2, 0.0),  # 4 bytes in each shard, and the call
        partial(link.pull, 0, 2, 0.0),  # published once
        partial(link.push, 0, 0.0),
        partial(link.push, 0, 0.0),
    ) == [2.0, 2.0, 4.0, 6.0]


def test_a_shard_does_not_wait_for_a_gradient_that_is_on_its_way() -> None:
    costs = Costs(update_s=0.01, publish_s=0.01)
    link = Network(2, 1, weight_bytes=100.0, gradient_bytes=100.0, bytes_per_s=10.0, costs=costs)
    pushed_s, pulled_s = happen(link, partial(link.push, 1, 0.0), partial(link.pull, 0, 0, 0.0))
    assert (pushed_s, pulled_s) == (11.0, 1.0)


def test_a_slow_network_and_software_make_many_workers_less_efficient() -> None:
    slow, fast = (efficiency(16, 0.25, gbit, 16, Costs()) for gbit in (10, 100))
    assert 0 < slow < fast < 1.01
    assert efficiency(16, 0.25, 100, 16, Costs(update_s=1e-8)) < fast
    assert efficiency(1, 0.25, 10, 1, Costs()) > 0.98


def test_a_heavier_network_is_slower_over_the_same_links() -> None:
    light, heavy = (efficiency(16, 0.25, 10, 16, Costs(), size, size) for size in (1e7, 2e8))
    assert heavy < light


def test_a_sleeping_learner_is_trained_by_the_real_loop() -> None:
    learner: Any = Sleeper(job_of(1), lambda: 0.0)
    trainer = AsyncTrainer(learner, 2)
    parts = split_parameters(learner.model, 2)
    weights = [torch.zeros(sum(p.numel() for p in part)) for part in parts]
    phase = EpochPhase("1.0", 1, 0, (0.1,), 1, None)
    [batch] = learner.micro_batches_at(iter([(0, 0)]))
    result, wires = trainer.compute(phase, 0, batch, weights)
    assert (result.loss_sum, result.samples) == (0.0, MICRO_BATCH_SAMPLES)
    assert len(wires) == 2


def test_trainings_with_and_without_staleness(tmp_path: Path) -> None:
    task = replace(SYNTHETIC, train=240, batch=48)
    data = task.prepare(Path(), tmp_path)
    slow = Environment("slow", 4, slower=4.0)
    results = {way: train(Training(task, way, slow, 8, 0), data) for way in WAYS}
    assert [results[way]["staleness_max"] for way in WAYS[:-1]] == [0] * 4
    assert results["async"]["staleness_mean"] > 2
    for result in results.values():
        assert result["accuracy"] > 20


def test_the_table_has_every_way_at_equal_epochs_and_at_equal_time() -> None:
    plans = list(table(Namespace(environments=list(ENVIRONMENTS)), 120))
    assert len(plans) == 2 * len(WAYS) * len(ENVIRONMENTS)
    steps = {
        (place.name, way): count
        for (way, place, count) in plans[1::2]  # in the time of 120 of four equal workers
    }
    assert steps["one slow worker", "async"] == pytest.approx(120 * 3.25 / 4, rel=0.06)
    assert steps["one slow worker", "sync"] == pytest.approx(120 / 4, rel=0.06)
    assert steps["slow network", "balanced"] == pytest.approx(steps["slow network", "sync"], abs=2)


def test_trainings_that_differ_in_what_they_compute_have_different_keys() -> None:
    """Times change what asynchronous workers compute, and the shares of balanced ones."""
    places = [make(4) for make in ENVIRONMENTS.values()]
    keys = {way: {Training(SYNTHETIC, way, place, 8, 0).key for place in places} for way in WAYS}
    assert [len(keys[way]) for way in WAYS] == [1, 1, 1, 2, 4]
    assert len(set().union(*keys.values())) == 9


def test_the_last_gradient_of_a_step_with_a_backup_worker_is_lost() -> None:
    sums = FastestGradients(workers=3, needed=2)

    def gradient(value: float) -> Any:
        return torch.full((2,), value).numpy()

    async def steps() -> list[list[float]]:
        fast = await asyncio.gather(sums.add(0, gradient(1)), sums.add(0, gradient(3)))
        late = await sums.add(0, gradient(100))
        ended = await sums.ended(0)
        next_step = await asyncio.gather(sums.add(1, gradient(5)), sums.add(1, gradient(7)))
        return [values.tolist() for values in (*fast, late, ended, *next_step)]

    assert asyncio.run(steps()) == [[2.0, 2.0]] * 4 + [[6.0, 6.0]] * 2


def test_computing_hides_the_messages_of_one_micro_batch_but_not_of_four() -> None:
    def step_s(name: str) -> tuple[float, float]:
        place = ENVIRONMENTS[name](4)
        seconds = simulated_steps_s(place, 40, 0.5, 4_700_000, 2, Costs())
        return seconds["async"], seconds["async, 4 micro-batches"]

    assert step_s("equal") == pytest.approx((0.5, 0.5), rel=0.06)
    one_s, four_s = step_s("slow network")
    assert one_s == pytest.approx(0.5, rel=0.06)
    assert four_s > 0.8
    one_s, four_s = step_s("one slow worker")
    assert four_s <= one_s == pytest.approx(0.5 * 4 / 3.25, rel=0.12)
