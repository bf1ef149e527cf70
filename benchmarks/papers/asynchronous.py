"""Sato (Denso IT Laboratory): asynchronous training on 48 GPUs, at the size of a small machine.

    python -m benchmarks.papers.asynchronous (--quick | --full) --data-root FOLDER [--plot FILE]

speedup     micro-batches per second relative to one worker that only computes, of processes on
            this machine whose computing is a sleep of 1 s; Ray, scheduler, shards and worker loop
            are real (async_processes.py), with the sections of jobs/imagenet_cnn11_async.yaml, a
            ResNet-8 of 4.7 MB and two shards. Mean, lowest and highest of the repetitions. The
            paper: more than 30 with 48 GPUs. 48 workers were simulated until 2026-11-24:
            results/async.md
ensemble    errors of trainings with several seeds, and of their ensemble, by
            `raytrain-opt evaluate --ensemble`: ResNet-8 (width 8), 3,072 images of CIFAR-100 (100
            classes) at 16 x 16, batch 96, momentum SGD, an epoch of warm-up, then linear decay
            from 0.1. The paper has 13.89 % (top 5) on ImageNet for its ensemble, and no members.

`--quick`: two worker processes, once, two seeds of 8 epochs, 5 minutes; `--full`: up to 16, three
repetitions, three seeds of 24, half an hour. `--plot FILE` draws the speed against the workers.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.async_processes import MICRO_BATCH_SAMPLES, asynchronous, worker_processes
from benchmarks.common import JOBS, machine
from benchmarks.comparison_tasks import Task
from benchmarks.papers.trainings import low_mean_high, paper_parser, write_plot
from raytrain_opt import Job, run
from raytrain_opt.cluster.connection import ray_session
from raytrain_opt.commands.evaluate import evaluate_runs
from raytrain_opt.config.load import load_job
from raytrain_opt.recording.recorder import versions

FILE = "imagenet_cnn11_async.yaml"
PAPER = {"speedup_at_48": 30.0, "ensemble_top5_error": 13.89}
TASK = Task("cifar100_fine_16", "cifar100_fine", 16, 3072, 96, batch=96)
SCHEDULE = {
    "policy": "schedule",
    "shape": "linear",
    "initial": 0.1,
    "final": 0.0,
    "warmup": {"epochs": 1, "lr": 0.01, "shape": "linear"},
}
SLEEP_S, STEPS, SHARDS = 1.0, 15, 2
SMALL_NETWORK = ("model={name: resnet8, args: {width: 64}}", "data={name: digits}")


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    result: dict[str, dict[Any, Any]] = {
        "measured": {count: measured(count, args.repeats) for count in args.workers},
        "ensemble": ensembles(args.data_root, args.seeds, args.epochs),
    }
    print(f"times one worker; the paper: more than {PAPER['speedup_at_48']:g} with 48")
    print(f"  measured: {_line(result['measured'])}")
    print(f"top-5 error; the paper's ensemble: {PAPER['ensemble_top5_error']} %")
    print(f"  {result['ensemble']}")
    write_plot(args.plot, lambda axes: _paint(axes, result["measured"]))
    about = {"paper": PAPER, "machine": machine(), "versions": versions()}
    print(json.dumps({**result, **about}))


def job_of(workers: int, *overrides: str) -> Job:
    """Return the job with this many workers."""
    size = f"global_batch_size={workers * MICRO_BATCH_SAMPLES}"
    return load_job(JOBS / FILE, [f"workers={{count: {workers}}}", size, *overrides])


def measured(workers: int, repeats: int) -> dict[str, float]:
    """Return the speedup of so many processes."""
    job = job_of(workers, *SMALL_NETWORK)
    with ray_session(None, verbose=False), worker_processes(job, SHARDS) as running:
        clocks = [lambda: SLEEP_S] * workers
        durations_s = [asynchronous(*running, STEPS, clocks) for _ in range(repeats)]
    return low_mean_high([workers * STEPS * SLEEP_S / seconds for seconds in durations_s])


def ensembles(root: Path, seeds: int, epochs: int) -> dict[str, Any]:
    """Return the error rates of trainings with these seeds, and of their ensemble."""
    with TemporaryDirectory() as folder:
        data = TASK.prepare(root, Path(folder))
        jobs = [TASK.job(data, epochs, seed, SCHEDULE, holds_out=False) for seed in range(seeds)]
        runs = [
            run(Job.model_validate({**job, "storage_path": folder}), in_process=True)
            for job in jobs
        ]
        return asdict(evaluate_runs([result.run_dir for result in runs], ensemble=True))


def _line(by_count: Mapping[int, Mapping[str, float]]) -> str:
    return ", ".join(
        f"{count}: {values['mean']:g} ({values['min']:g} to {values['max']:g})"
        for count, values in by_count.items()
    )


def _paint(axes: Any, by_processes: Mapping[int, Mapping[str, float]]) -> None:
    means = [values["mean"] for values in by_processes.values()]
    axes.plot(list(by_processes), means, "kx", label="measured")
    axes.plot([1, 48], [1, 48], ":", color="0.5", label="ideal")
    axes.plot([48], [PAPER["speedup_at_48"]], "k^", label="paper: more")
    axes.set_xlabel("workers")
    axes.set_ylabel("times one worker")


def _arguments() -> argparse.Namespace:
    parser = paper_parser(__doc__, "half an hour")
    args = parser.parse_args()
    args.workers = (1, 2, 4, 8, 16) if args.full else (1, 2)
    args.repeats, args.seeds, args.epochs = (3, 3, 24) if args.full else (1, 2, 8)
    return args


if __name__ == "__main__":
    main()
