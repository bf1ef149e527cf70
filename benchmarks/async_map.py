"""Which mode is fastest, by simulation with measured costs of software: the map of docs/async.md.

    python -m benchmarks.async_map

Three workers per node, 100 MB of weights in fp32, a shard per worker. `sync` and `balanced` take
as long as computing (async_environments.py), the part of a ring all-reduce between the nodes that
the backward pass of the last micro-batch does not hide, and the update and the copy of a gradient
in each worker; `balanced` also a call for each micro-batch, as measured by async_straggler.py with
equal workers. `async` is simulated (async_simulation.py). The other costs are measured by
async_costs.py when this starts, on a CPU: with GPUs they are lower.

Prints a table in Markdown: the throughput of `balanced` / `async` relative to `sync`, the fastest
one bold if it gains 5 %; the last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.async_costs import measure_costs
from benchmarks.async_environments import ENVIRONMENTS, Environment, compute_s
from benchmarks.async_processes import micro_batch_done
from benchmarks.async_simulation import Costs, Network, Simulation
from benchmarks.async_straggler import BYTES, nodes_of
from benchmarks.common import machine
from raytrain_opt.async_training.scheduler import EpochPhase
from raytrain_opt.cluster.connection import ray_session
from raytrain_opt.recording.recorder import versions

KINDS = ("one slow worker", "jitter", "equal")
WORKERS, GBIT_PER_S, SECONDS = (4, 16, 48), (10, 100), (0.025, 0.1, 0.25, 1.0)
STEPS = 16
# Four equal workers with 16 micro-batches each took 0.07 s longer for a step than with one each.
MICRO_BATCH_CALL_S = 0.07 / 15
# Of a micro-batch's time; DDP sends gradients meanwhile.
BACKWARD = 2 / 3
# A gain must be worth another mode.
WORTH = 1.05


def step_s(way: str, place: Environment, seconds: float, gbit_per_s: float, costs: Costs) -> float:
    """Return the mean time of a step, whose equal share takes `seconds` of a worker of speed 1."""
    clock, size, nodes = place.clock(0), BYTES, nodes_of(place.workers)
    bytes_per_s = gbit_per_s * 1e9 / 8
    if way == "async":
        phase = EpochPhase("1.0", 1, 0, (0.1,) * STEPS, place.workers, None)
        link = Network(nodes, place.workers, size, size, bytes_per_s, costs)
        run = Simulation(
            phase, place.workers, lambda w: seconds * clock(w), link, micro_batch_done
        )
        return run.run() / STEPS
    computed_s = seconds * sum(compute_s(way, place, clock) for _ in range(STEPS)) / STEPS
    split = place.split if way == "balanced" else 1
    ring_s = 2 * (nodes - 1) / nodes * size / bytes_per_s
    waits_s = max(0.0, ring_s - BACKWARD * seconds / split)
    calls_s = MICRO_BATCH_CALL_S * (split - 1)
    return computed_s + waits_s + calls_s + (costs.update_s + costs.worker_s) * size


def cells(costs: Costs) -> Iterator[dict[str, Any]]:
    """Yield the throughput of each mode relative to `sync`."""
    for kind in KINDS:
        for gbit_per_s in GBIT_PER_S:
            for workers in WORKERS:
                for seconds in SECONDS:
                    place = ENVIRONMENTS[kind](workers)
                    setting = (place, seconds, gbit_per_s, costs)
                    sync_s = step_s("sync", *setting)
                    yield {
                        "kind": kind,
                        "gbit_per_s": gbit_per_s,
                        "workers": workers,
                        "seconds": seconds,
                        "balanced": round(sync_s / step_s("balanced", *setting), 2),
                        "async": round(sync_s / step_s("async", *setting), 2),
                    }


def markdown(results: list[dict[str, Any]]) -> str:
    """Return the table: a row for each kind, network and number of workers."""
    lines = [
        "| workers are | Gbit/s | workers | " + " | ".join(f"{s:g} s" for s in SECONDS) + " |",
        "|---|---|---" + "|---" * len(SECONDS) + "|",
    ]
    for first in range(0, len(results), len(SECONDS)):
        row = results[first : first + len(SECONDS)]
        head = f"| {row[0]['kind']} | {row[0]['gbit_per_s']} | {row[0]['workers']} | "
        lines.append(head + " | ".join(map(_gains, row)) + " |")
    return "\n".join(lines)


def _gains(cell: dict[str, Any]) -> str:
    gains = [cell[mode] for mode in ("balanced", "async")]
    return " / ".join(f"**{g:.1f}**" if g == max(gains) >= WORTH else f"{g:.1f}" for g in gains)


def main() -> None:
    argparse.ArgumentParser(description="The fastest mode by setting.").parse_args()
    with ray_session(None, verbose=False):
        costs = measure_costs()
    results = list(cells(costs))
    print(markdown(results))
    result = {"costs": asdict(costs), "cells": results}
    print(json.dumps({**result, "machine": machine(), "versions": versions()}))


if __name__ == "__main__":
    main()
