"""Sato (Denso IT Laboratory): asynchronous training on 48 GPUs, at the size of a small machine.

    python -m benchmarks.papers.asynchronous (--quick | --full) --data-root FOLDER [--plot FILE]

speedup     images per second relative to one worker that only computes. The paper: more than 30
            with 48 GPUs, which are 16 nodes of TSUBAME 2.5 (three K20X and two links of InfiniBand
            QDR each).
              simulated  jobs/imagenet_cnn11_async.yaml (its network's 60 MB of weights, gradients
                         compressed as its section `parallel` says, a shard per node) on a
                         simulated network, scheduled by the product's scheduler, with the costs of
                         software (`COSTS`) and with none. A micro-batch of
                         the job's 32 images has 2.2 TFLOP: 1 s is about a K20X, 0.25 s a V100 in
                         fp32, 0.1 s a newer GPU; 32 Gbit/s is one of the paper's links. Mean,
                         lowest and highest of three seeds, which vary the micro-batches by 5 %;
                         the figures repeat exactly
              measured   the same job with a ResNet-8 of 4.7 MB and two shards: worker processes
                         on this machine whose computing is a sleep of 1 s; Ray, scheduler, shards
                         and worker loop are real (async_processes.py). Mean, lowest and highest
                         of the repetitions
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
import math
from collections.abc import Mapping
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.async_processes import MICRO_BATCH_SAMPLES, asynchronous, worker_processes
from benchmarks.async_simulation import Costs, Network, Simulation
from benchmarks.common import JOBS, machine
from benchmarks.comparison_tasks import Task
from benchmarks.papers.trainings import low_mean_high, paper_parser, write_plot
from raytrain_opt import Job, run
from raytrain_opt.async_training.scheduler import EpochPhase
from raytrain_opt.async_training.weight_shard import wire_dtype
from raytrain_opt.cluster.connection import ray_session
from raytrain_opt.commands.evaluate import evaluate_runs
from raytrain_opt.config.load import load_job
from raytrain_opt.models import build_model
from raytrain_opt.recording.recorder import versions
from raytrain_opt.results import Steps

FILE = "imagenet_cnn11_async.yaml"
PAPER = {"speedup_at_48": 30.0, "ensemble_top5_error": 13.89}
# Measured on 2 cores of an AMD EPYC, 2026-11-24, with the product's functions on 20 MB of weights;
# they differ by a third from run to run.
COSTS = Costs(update_s=0.86e-9, publish_s=1.66e-9, worker_s=0.27e-9, call_s=0.95e-3)
# Seconds of a micro-batch and Gbit/s of a node, by the hardware that they resemble.
HARDWARE = {
    "K20X, QDR": (1.0, 32.0),
    "V100, 25 Gbit/s": (0.25, 25.0),
    "newer, 100 Gbit/s": (0.1, 100.0),
}
TASK = Task("cifar100_fine_16", "cifar100_fine", 16, 3072, 96, batch=96)
SCHEDULE = {
    "policy": "schedule",
    "shape": "linear",
    "initial": 0.1,
    "final": 0.0,
    "warmup": {"epochs": 1, "lr": 0.01, "shape": "linear"},
}
SLEEP_S, STEPS, SEEDS, SHARDS = 1.0, 15, 3, 2
WORKER_COUNTS, WORKERS_PER_NODE = (1, 2, 4, 8, 16, 32, 48), 3
SMALL_NETWORK = (
    "model={name: resnet8, args: {width: 64}}",
    "data={name: digits}",
)


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    result: dict[str, dict[Any, Any]] = {
        "simulated": {
            f"{hardware}, {name}": simulated(seconds, gbit_per_s, of_software)
            for hardware, (seconds, gbit_per_s) in HARDWARE.items()
            for name, of_software in (("costs", COSTS), ("no costs", Costs()))
        },
        "measured": {count: measured(count, args.repeats) for count in args.workers},
        "ensemble": ensembles(args.data_root, args.seeds, args.epochs),
    }
    print(f"times one worker; the paper: more than {PAPER['speedup_at_48']:g} with 48")
    for hardware, by_count in result["simulated"].items():
        print(f"  simulated, {hardware}: {_line(by_count)}")
    print(f"  measured: {_line(result['measured'])}")
    print(f"top-5 error; the paper's ensemble: {PAPER['ensemble_top5_error']} %")
    print(f"  {result['ensemble']}")
    write_plot(args.plot, lambda axes: _paint(axes, result["simulated"], result["measured"]))
    about = {"paper": PAPER, "machine": machine(), "versions": versions()}
    print(json.dumps({**result, **about}))


def job_of(workers: int, *overrides: str) -> Job:
    """Return the job with this many workers."""
    size = f"global_batch_size={workers * MICRO_BATCH_SAMPLES}"
    return load_job(JOBS / FILE, [f"workers={{count: {workers}}}", size, *overrides])


def simulated(seconds: float, gbit_per_s: float, costs: Costs) -> dict[int, dict[str, float]]:
    """Return the speedup by number of workers."""
    job = job_of(1)
    with torch.device("meta"):
        model = build_model(job.model, num_classes=1000, sample_shape=(3, 224, 224), seed=0)
    parameters = list(model.parameters())
    weights = sum(parameter.nbytes for parameter in parameters)
    dtype = wire_dtype(job.parallel.compression, parameters[0].dtype)
    gradients = weights * dtype.itemsize / parameters[0].itemsize

    def speedup(count: int, seed: int) -> float:
        size = (weights, gradients)
        shards = nodes_of(count)  # as in a run
        return count * efficiency(count, seconds, gbit_per_s, shards, costs, *size, seed)

    return {
        count: low_mean_high([speedup(count, seed) for seed in range(SEEDS)])
        for count in WORKER_COUNTS
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
    weight_bytes: float,
    gradient_bytes: float,
    seed: int,
) -> float:
    """Return the micro-batches per second and worker relative to one that only computes."""
    bytes_per_s = gbit_per_s * 1e9 / 8
    link = Network(nodes_of(workers), shards, weight_bytes, gradient_bytes, bytes_per_s, costs)
    random = Random(seed)
    phase = EpochPhase("1.0", 1, Steps(0, (0.1,) * 60), workers, None)
    # Workers of exactly equal speed would fetch and push at the same moments.
    run = Simulation(phase, workers, lambda _: seconds * random.uniform(0.95, 1.05), link)
    return round(phase.size * seconds / (run.run() * workers), 3)


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
        return evaluate_runs([result.run_dir for result in runs], ensemble=True).to_json()


def _line(by_count: Mapping[int, Mapping[str, float]]) -> str:
    return ", ".join(
        f"{count}: {values['mean']:g} ({values['min']:g} to {values['max']:g})"
        for count, values in by_count.items()
    )


def _paint(
    axes: Any,
    by_hardware: Mapping[str, Mapping[int, Mapping[str, float]]],
    by_processes: Mapping[int, Mapping[str, float]],
) -> None:
    for hardware, by_count in by_hardware.items():
        if "no costs" not in hardware:
            means = [values["mean"] for values in by_count.values()]
            axes.plot(list(by_count), means, marker="o", label=hardware.split(",")[0])
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
