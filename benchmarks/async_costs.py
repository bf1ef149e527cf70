"""Measure what the software of asynchronous training costs, for the simulation of many workers.

CPU seconds of one thread per byte, with the product's functions on a ResNet-8 of width 128 (5
million parameters) and momentum SGD; a call of an actor is the lower quartile of real ones. Where
there is a GPU, a worker's weights and gradient are on it, so that its part contains the copies
between host and device, during which its thread waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

import ray
import torch

from benchmarks.async_simulation import Costs
from raytrain_opt.async_training.scheduler import EpochPhase
from raytrain_opt.async_training.weight_shard import WeightShard, from_wire, to_wire
from raytrain_opt.config.updates import OptimizerSection
from raytrain_opt.models.networks import resnet8
from raytrain_opt.optim.factory import build_optimizer
from raytrain_opt.results import Steps
from raytrain_opt.train.state import to_cpu_state

_REPETITIONS = 20
_SGD = OptimizerSection.model_validate(
    {"name": "SGD", "args": {"momentum": 0.9, "weight_decay": 5e-4}}
)


class Echo:
    """An actor that answers."""

    def echo(self) -> None: ...


def measure_costs() -> Costs:
    """Return the costs; Ray is connected."""
    torch.set_num_threads(1)
    shard = open_shard()
    size = shard.weights.nbytes
    gradient = to_wire(torch.full_like(shard.weights, 1e-6), shard.dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.zeros_like(shard.weights, device=device)
    numbers = iter(range(shard.phase.size))

    def update() -> None:
        shard.apply(next(numbers), shard.version, from_wire(gradient, shard.dtype))

    def publish() -> Any:
        return ray.put(to_wire(shard.weights_ahead(), shard.dtype))

    weights = publish()

    def work() -> Any:
        """Do what a worker does for each micro-batch: read weights, send a gradient."""
        model.copy_(from_wire(ray.get(weights), shard.dtype))
        return ray.put(to_wire(model, shard.dtype))

    # CPU seconds would not show waiting for a device.
    worker_clock = time.process_time if device == "cpu" else time.perf_counter
    echo: Any = ray.remote(Echo).options(num_cpus=0).remote()
    ray.get(echo.echo.remote())
    calls_s = [_wall_s(lambda: ray.get(echo.echo.remote())) for _ in range(200)]
    return Costs(
        update_s=_median_s(update, time.process_time) / size,
        publish_s=_median_s(publish, time.process_time) / size,
        worker_s=_median_s(work, worker_clock) / (2 * size),
        call_s=quantiles(calls_s)[0],
    )


def open_shard() -> WeightShard:
    """Return a shard with all weights, in a phase."""
    model = resnet8(num_classes=10, sample_shape=(3, 32, 32), width=128).to(
        memory_format=torch.channels_last
    )
    optimizer = build_optimizer(_SGD, model, steps_per_epoch=1)
    state = to_cpu_state(model.state_dict(), optimizer.state_dict(), {}, copy=True)
    shard = WeightShard(_SGD, model, 0, 1, 1)
    shard.load(state, EpochPhase("1.0", 1, Steps(0, (0.01,) * 100), 1, None))
    return shard


def _median_s(function: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the median seconds of a call by this clock, after two calls that do not count."""
    measured = []
    for _ in range(_REPETITIONS + 2):
        start_s = clock()
        function()
        measured.append(clock() - start_s)
    return median(measured[2:])


def _wall_s(function: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    function()
    return time.perf_counter() - start_s
