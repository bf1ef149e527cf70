"""Asynchronous against synchronous training: one slow worker, and many workers.

    python -m benchmarks.async_straggler [--repeats 2] [--parts ...]

Four parts; the JSON object of the last line holds the keys of each.

balanced     `parallel.mode: balanced` against `sync` with the product's learner, 4 workers and
             sleeps in place of computing (balanced_training.py): samples/s with one worker 4 x
             slower, `balanced_over_sync` (ideal: 3.25), with equal ones,
             `balanced_over_sync_equal_workers`, and the fraction of the time in which workers
             compute when each micro-batch takes 1 to 4 times longer at random,
             `balanced_over_ideal_jitter`.
throughput   every way in every environment in real processes whose computing is a **sleep** of
             `--seconds` (async_processes.py): steps per second relative to those of `sync` with
             equal workers, measured and simulated. The simulation has the measured costs of
             software for async, and none for the others. `async_over_sync`: with one worker 4
             times slower; `async_over_sync_even`: with equal ones.
scaling      up to 48 simulated workers on a simulated network, scheduled by the product's
             scheduler (async_simulation.py), with the measured costs of software (async_costs.py):
             `efficiency_at_48` by seconds of a micro-batch, with and without these costs, and a
             table over bandwidths. Three workers per node, 100 MB of weights (ResNet-50), without
             variation.
table        accuracy of every way in every environment: part `table` of async_training.py, whose
             options follow, at least `--data-root FOLDER`.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from itertools import product
from random import Random
from statistics import median
from typing import Any

from benchmarks import async_training
from benchmarks.async_costs import measure_costs
from benchmarks.async_processes import WAYS as PROCESS_WAYS
from benchmarks.async_processes import (
    environments_of,
    job_of,
    measure_steps_s,
    micro_batch_done,
    network,
    simulated_steps_s,
    worker_processes,
)
from benchmarks.async_simulation import Costs, Network, Simulation
from benchmarks.balanced_training import CASES, Run, measure
from benchmarks.common import machine
from raytrain_opt.async_training.scheduler import EpochPhase
from raytrain_opt.cluster.connection import ray_session
from raytrain_opt.recording.recorder import versions

WORKERS = 4
WORKER_COUNTS = (1, 2, 4, 8, 16, 32, 48)
GBIT_PER_S = (10, 25, 100)
MICRO_BATCHES_S = (0.025, 0.05, 0.1, 0.25)
BYTES, WORKERS_PER_NODE = 1e8, 3


def balanced(args: argparse.Namespace) -> dict[str, Any]:
    """Measure balanced and synchronous training."""
    names = [(mode, case) for case in CASES for mode in ("sync", "balanced")]
    runs = [Run(mode, CASES[case]) for mode, case in names]
    results = measure(runs, WORKERS, args.balanced_steps, args.share_s)
    measured = dict(zip(names, results, strict=True))
    speeds = {run: result["samples_per_s"] for run, result in measured.items()}
    slow, even = (speeds["balanced", c] / speeds["sync", c] for c in ("slow", "even"))
    return {
        "balanced_over_sync": round(slow, 3),
        "balanced_over_sync_equal_workers": round(even, 3),
        "balanced_over_ideal_jitter": measured["balanced", "jitter"]["busy"],
        "balanced_runs": {f"{mode}_{case}": r for (mode, case), r in measured.items()},
        "share_s": args.share_s,
    }


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every way in every environment, and compare with the simulation."""
    places, job = environments_of(args.workers), job_of(args.workers)
    size = sum(parameter.nbytes for parameter in network(job).parameters())
    runs: list[dict[str, dict[str, float]]] = []
    with ray_session(None, verbose=False), worker_processes(job, args.shards) as running:
        costs = measure_costs()
        for _ in range(args.repeats):
            runs.append(measure_steps_s(places, args.steps, args.seconds, running))
            print(runs[-1], flush=True)
    simulated = {
        place.name: simulated_steps_s(place, args.steps, args.seconds, size, args.shards, costs)
        for place in places
    }
    speeds: dict[str, Any] = {}
    for name, way in product(simulated, PROCESS_WAYS):
        of_runs = [run["equal"]["sync"] / run[name][way] for run in runs]
        expected = simulated["equal"]["sync"] / simulated[name][way]
        speeds.setdefault(name, {})[way] = {
            "measured": [round(speed, 3) for speed in of_runs],
            "simulated": round(expected, 3),
            "ratio": round(median(of_runs) / expected, 3),
        }
    slow, equal = (
        {way: median(speeds[name][way]["measured"]) for way in PROCESS_WAYS}
        for name in ("one slow worker", "equal")
    )
    return {
        "async_over_sync": round(slow["async"] / slow["sync"], 3),
        "async_over_sync_even": round(equal["async"] / equal["sync"], 3),
        "speeds": speeds,
        "costs": asdict(costs),
        "workers": args.workers,
        "share_s": args.seconds,
        "steps": args.steps,
        "shards": args.shards,
        "simulated_compute": True,
    }


def scaling(args: argparse.Namespace) -> dict[str, Any]:
    """Compute the efficiencies on simulated networks."""
    with ray_session(None, verbose=False):
        costs = measure_costs()
    at_48 = [
        {
            "shards": shards,
            "software": software,
            "efficiency": {s: efficiency(48, s, 25, shards, c) for s in MICRO_BATCHES_S},
        }
        for shards in (nodes_of(48), 48)
        for software, c in (("measured", costs), ("none", Costs()))
    ]
    table = [
        {
            "gbit_per_s": gbit_per_s,
            "efficiency": {
                workers: efficiency(workers, 0.25, gbit_per_s, workers, costs)
                for workers in WORKER_COUNTS
            },
        }
        for gbit_per_s in GBIT_PER_S
    ]
    return {
        "efficiency_at_48": at_48,
        "scaling": table,
        "scaling_costs": asdict(costs),
        "paper_efficiency_at_48": 0.625,
    }


def nodes_of(workers: int) -> int:
    """Return the number of nodes that the workers fill."""
    return math.ceil(workers / WORKERS_PER_NODE)


def efficiency(
    workers: int,
    seconds: float,
    gbit_per_s: float,
    shards: int,
    costs: Costs,
    weight_bytes: float = BYTES,
    gradient_bytes: float = BYTES,
    seed: int = 0,
) -> float:
    """Return the micro-batches per second and worker relative to one that only computes."""
    bytes_per_s = gbit_per_s * 1e9 / 8
    link = Network(nodes_of(workers), shards, weight_bytes, gradient_bytes, bytes_per_s, costs)
    random = Random(seed)
    phase = EpochPhase("1.0", 1, 0, (0.1,) * 60, workers, None)
    # Workers of exactly equal speed would fetch and push at the same moments.
    run = Simulation(
        phase, workers, lambda _: seconds * random.uniform(0.95, 1.05), link, micro_batch_done
    )
    return round(phase.size * seconds / (run.run() * workers), 3)


def main() -> None:
    args, rest = _arguments()
    table = "table" in args.parts and async_training.arguments([*rest, "--parts", "table"])
    result: dict[str, Any] = {}
    if "balanced" in args.parts:
        result |= balanced(args)
    if "throughput" in args.parts:
        result |= throughput(args)
    if "scaling" in args.parts:
        result |= scaling(args)
    if table:
        result["table"] = async_training.rows(table)
    print(json.dumps({**result, "machine": machine(), "versions": versions()}))


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments, and those of the part `table`."""
    parser = argparse.ArgumentParser(description="Asynchronous against synchronous training.")
    names = ("balanced", "throughput", "scaling", "table")
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a worker's share of a step")
    parser.add_argument("--balanced-steps", type=int, default=20)
    parser.add_argument("--share-s", type=float, default=1.0, help="of an equal share of a step")
    parser.add_argument("--shards", type=int, default=2)
    args, rest = parser.parse_known_args()
    if rest and "table" not in args.parts:
        parser.error(f"only for the part table: {' '.join(rest)}")
    return args, rest


if __name__ == "__main__":
    main()
