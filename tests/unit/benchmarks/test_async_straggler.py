"""The benchmark's simulated clock and network, and its trainings."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.async_environments import ENVIRONMENTS, WAYS, Environment
from benchmarks.async_simulation import Costs, Network
from benchmarks.async_straggler import MICRO_BATCH_SAMPLES, Sleeper, efficiency, job_of
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


def test_a_link_carries_no_more_than_it_can() -> None:
    link = Network(2, 1, weight_bytes=100.0, gradient_bytes=100.0, bytes_per_s=50.0)
    assert link.pull(0, 0, 1.0) == 1.0  # the shard is on its node
    assert link.pull(1, 0, 1.0) == 3.0
    assert link.pull(3, 0, 1.5) == 3.0  # its node has this version
    assert link.pull(1, 1, 1.0) == 5.0
    assert link.push(1, 0.0) == pytest.approx(2.0, rel=1e-6)
    assert link.push(1, 0.0) == pytest.approx(4.0, rel=1e-6)


def test_a_shard_makes_one_update_after_the_other() -> None:
    costs = Costs(update_s=0.5, publish_s=0.25, call_s=1.0)
    link = Network(1, 2, weight_bytes=8.0, gradient_bytes=8.0, bytes_per_s=1.0, costs=costs)
    assert link.push(0, 0.0) == 3.0  # 4 bytes in each shard, and the call
    assert link.push(0, 0.0) == 5.0
    assert link.pull(0, 2, 0.0) == 6.0
    assert link.pull(0, 2, 0.0) == 6.0  # published once


def test_a_slow_network_and_software_make_many_workers_less_efficient() -> None:
    slow, fast = (efficiency(16, 0.25, gbit, 16, Costs()) for gbit in (10, 100))
    assert 0 < slow < fast < 1.01
    assert efficiency(16, 0.25, 100, 16, Costs(update_s=1e-8)) < fast
    assert efficiency(1, 0.25, 10, 1, Costs()) > 0.98


def test_a_heavier_network_is_slower_over_the_same_links() -> None:
    light, heavy = (efficiency(16, 0.25, 10, 16, Costs(), size, size) for size in (1e7, 2e8))
    assert heavy < light


def test_a_sleeping_learner_is_trained_by_the_real_loop() -> None:
    learner: Any = Sleeper(job_of(1, 2), 0.0)
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
