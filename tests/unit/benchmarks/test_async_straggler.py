"""The simulated clock and network, and a worker that sleeps in place of computing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.async_processes import MICRO_BATCH_SAMPLES, Sleeper, job_of
from benchmarks.async_simulation import Costs, Network
from benchmarks.async_straggler import efficiency
from raytrain_opt.async_training.scheduler import EpochPhase
from raytrain_opt.async_training.weight_shard import split_parameters
from raytrain_opt.async_training.worker_loop import AsyncTrainer
from raytrain_opt.results import Steps


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


def test_a_slow_network_and_software_make_many_workers_less_efficient() -> None:
    slow, fast = (efficiency(16, 0.25, gbit, 16, Costs()) for gbit in (10, 100))
    assert 0 < slow < fast < 1.01
    assert efficiency(16, 0.25, 100, 16, Costs(update_s=1e-8)) < fast
    assert efficiency(1, 0.25, 10, 1, Costs()) > 0.98


def test_a_sleeping_learner_is_trained_by_the_real_loop() -> None:
    learner: Any = Sleeper(job_of(1), lambda: 0.0)
    trainer = AsyncTrainer(learner, 2)
    parts = split_parameters(learner.model, 2)
    weights = [torch.zeros(sum(p.numel() for p in part)) for part in parts]
    phase = EpochPhase("1.0", 1, Steps(0, (0.1,)), 1, None)
    [batch] = learner.micro_batches_at(iter([(0, 0)]))
    result, wires = trainer.compute(phase, 0, batch, weights)
    assert (result.loss_sum, result.samples) == (0.0, MICRO_BATCH_SAMPLES)
    assert len(wires) == 2
