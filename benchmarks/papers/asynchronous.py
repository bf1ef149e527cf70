"""Sato (Denso IT Laboratory): asynchronous training on 48 GPUs, at the size of a small machine.

    python -m benchmarks.papers.asynchronous (--quick | --full) [--data-root FOLDER]

speedup     images per second relative to one worker that only computes. The paper: more than 30
            with 48 GPUs, which are 16 nodes of TSUBAME 2.5 (three K20X and two links of InfiniBand
            QDR each).
              simulated  jobs/imagenet_cnn11_async.yaml (its network's 60 MB of weights, a shard
                         per worker) on a simulated network, scheduled by the product's scheduler,
                         with costs of software measured here (async_costs.py). A micro-batch of
                         the job's 32 images has 2.2 TFLOP: 1 s is about a K20X, 0.25 s a V100 in
                         fp32, 0.1 s a newer GPU; 32 Gbit/s is one of the paper's links.
              measured   worker processes on this machine whose computing is a sleep of 1 s; Ray,
                         scheduler, shards, worker loop and the 4.7 MB of weights are real
                         (async_straggler.py).
ensemble    top-5 error of trainings with several seeds and of their ensemble (ensemble.py); the
            paper has 13.89 % on ImageNet for its ensemble, and no members.

`--quick`: two worker processes, two seeds of 8 epochs; `--full`: up to 16, three seeds of 24. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import ensemble
from benchmarks.async_costs import measure_costs
from benchmarks.async_simulation import Costs
from benchmarks.async_straggler import (
    MICRO_BATCH_SAMPLES,
    WORKER_COUNTS,
    asynchronous,
    efficiency,
    worker_processes,
)
from benchmarks.common import machine
from benchmarks.comparison_tasks import SYNTHETIC
from benchmarks.papers.trainings import JOBS, paper_parser
from raytrain_opt.cluster.connection import ray_session
from raytrain_opt.config.load import load_job
from raytrain_opt.models import build_model
from raytrain_opt.recording.recorder import versions

PAPER = {"speedup_at_48": 30.0, "ensemble_top5_error": 13.89}
# Seconds of a micro-batch and Gbit/s of a node, by the hardware that they resemble.
HARDWARE = {"K20X, QDR": (1.0, 32.0), "V100, 25 Gbit/s": (0.25, 25.0), "0.1 s, 100": (0.1, 100.0)}
SLEEP_S, STEPS, SHARDS = 1.0, 15, 2


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    with ray_session(None, verbose=False):
        costs = measure_costs()
    result: dict[str, dict[Any, Any]] = {
        "costs": asdict(costs),
        "simulated": simulated(costs),
        "measured": {count: measured(count) for count in args.workers},
        "ensemble": ensembles(args.data_root, args.seeds, args.epochs),
    }
    for name, rows in result.items():
        print(name)
        for key, values in rows.items():
            print(f"  {key}: {values}")
    print(json.dumps({**result, "paper": PAPER, "machine": machine(), "versions": versions()}))


def simulated(costs: Costs) -> dict[str, dict[int, float]]:
    """Return the speedup by hardware and number of workers."""
    job = load_job(JOBS / "imagenet_cnn11_async.yaml")
    with torch.device("meta"):
        model = build_model(job.model, num_classes=1000, sample_shape=(3, 224, 224), seed=0)
    megabytes = sum(p.nbytes for p in model.parameters()) / 1e6
    return {
        name: {
            count: round(count * efficiency(count, seconds, gbit, count, costs, megabytes), 1)
            for count in WORKER_COUNTS
        }
        for name, (seconds, gbit) in HARDWARE.items()
    }


def measured(workers: int) -> float:
    """Return the speedup of so many processes."""
    with ray_session(None, verbose=False), worker_processes(workers, SHARDS) as running:
        samples_per_s, _ = asynchronous(*running, STEPS, [SLEEP_S] * workers)
    return round(samples_per_s * SLEEP_S / MICRO_BATCH_SAMPLES, 2)


def ensembles(root: Path | None, seeds: int, epochs: int) -> dict[str, Any]:
    """Return error rates in percent of the members and of their ensemble."""
    task = SYNTHETIC if root is None else ensemble.TASK
    with TemporaryDirectory() as folder:
        data = task.prepare(root or Path(), Path(folder))
        members = [ensemble.train(task, data, epochs, seed, 1)[-1] for seed in range(seeds)]
    return ensemble.compare(members)


def _arguments() -> argparse.Namespace:
    parser = paper_parser(__doc__, "a quarter of an hour")
    args = parser.parse_args()
    args.workers = (1, 2, 4, 8, 16) if args.full else (1, 2)
    args.seeds, args.epochs = (3, 24) if args.full else (2, 8)
    return args


if __name__ == "__main__":
    main()
