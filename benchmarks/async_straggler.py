"""Workers of different speeds: shares by speed and asynchronous training against equal shares.

    python -m benchmarks.async_straggler [--repeats 2] [--workers 4] [--parts ...]

Two parts; the JSON object of the last line holds the keys of each.

balanced     shares by speed against equal ones with the product's learner, 4 workers and
             sleeps in place of computing (balanced_training.py): samples/s with one worker 4 x
             slower, `balanced_over_sync` (ideal: 3.25), with equal ones,
             `balanced_over_sync_equal_workers`, and the fraction of the time in which workers
             compute when each micro-batch takes 1 to 4 times longer at random,
             `balanced_over_ideal_jitter`.
throughput   `async` on Ray (async_processes.py) against `sync` (balanced_training.py) with
             `--workers` workers and sleeps in place of computing: steps per second with one worker
             4 times slower, `async_over_sync`, and with equal ones, `async_over_sync_even`.

The accuracy of each way in each environment, and backup workers, were measured until 2026-11-24:
results/async.md.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from statistics import median
from typing import Any

from benchmarks.async_processes import asynchronous, job_of, worker_processes
from benchmarks.balanced_training import CASES, Run, measure
from benchmarks.common import machine
from raytrain_opt.cluster.connection import ray_session
from raytrain_opt.recording.recorder import versions

WORKERS = 4


def balanced(args: argparse.Namespace) -> dict[str, Any]:
    """Measure shares by speed and equal ones."""
    names = [(shares, case) for case in CASES for shares in ("equal", "balanced")]
    runs = [Run(shares == "balanced", CASES[case]) for shares, case in names]
    results = measure(runs, WORKERS, args.steps, args.share_s)
    measured = dict(zip(names, results, strict=True))
    speeds = {run: result["samples_per_s"] for run, result in measured.items()}
    slow, even = (speeds["balanced", c] / speeds["equal", c] for c in ("slow", "even"))
    return {
        "balanced_over_sync": round(slow, 3),
        "balanced_over_sync_equal_workers": round(even, 3),
        "balanced_over_ideal_jitter": measured["balanced", "jitter"]["busy"],
        "balanced_runs": {f"{shares}_{case}": r for (shares, case), r in measured.items()},
    }


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Measure asynchronous and synchronous training."""
    cases = {case: CASES[case] for case in ("slow", "even")}
    job = job_of(args.workers)
    clocks = {
        name: [partial(case(rank, args.workers, args.share_s), 1) for rank in range(args.workers)]
        for name, case in cases.items()
    }
    ratios: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(args.repeats):
        with ray_session(None, verbose=False), worker_processes(job, args.shards) as running:
            async_s = {n: asynchronous(*running, args.steps, clocks[n]) for n in cases}
        runs = [Run(False, case) for case in cases.values()]
        results = measure(runs, args.workers, args.steps, args.share_s, samples_per_worker=1)
        for name, result in zip(cases, results, strict=True):
            sync_s = args.steps * args.workers / result["samples_per_s"]
            ratios[name].append(round(sync_s / async_s[name], 3))
        print(ratios, flush=True)
    return {
        "async_over_sync": median(ratios["slow"]),
        "async_over_sync_even": median(ratios["even"]),
        "async_over_sync_all": ratios,
    }


PARTS = {"balanced": balanced, "throughput": throughput}


def main() -> None:
    parser = argparse.ArgumentParser(description="Training with workers of different speeds.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=2, help="of the part throughput")
    parser.add_argument("--workers", type=int, default=WORKERS, help="of the part throughput")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--share-s", type=float, default=1.0, help="of an equal share of a step")
    parser.add_argument("--shards", type=int, default=2)
    args = parser.parse_args()
    result = {key: value for part in args.parts for key, value in PARTS[part](args).items()}
    print(json.dumps({**result, **vars(args), "machine": machine(), "versions": versions()}))


if __name__ == "__main__":
    main()
