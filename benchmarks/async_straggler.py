"""Asynchronous against synchronous training: one slow worker, and many workers.

    python -m benchmarks.async_straggler [--data-root FOLDER] [--repeats 2] [--parts ...]

Four parts; the JSON object of the last line holds the keys of each:

balanced     `parallel.mode: balanced` against `sync` with the product's learner, 4 workers and
             sleeps in place of computing (balanced_training.py): samples/s with one worker 4 x
             slower, `balanced_over_sync` (ideal: 3.25), with equal ones,
             `balanced_over_sync_equal_workers`, and the fraction of the time in which workers
             compute when each micro-batch takes 1 to 4 times longer at random,
             `balanced_over_ideal_jitter`.
throughput   4 workers, each a process with one thread; one of them is 4 times slower. **Their
             computing is simulated**: a micro-batch is a sleep of `--seconds`, because 4 real
             computations on 2 cores would measure the cores. Everything else is real: Ray, the
             product's scheduler, shards and worker loop; gradients and weights of ResNet-8
             (width 64, 1.2 million parameters) travel. Synchronous training is an all-reduce of
             the same gradient with gloo after each such sleep, without an optimizer step.
             `async_over_sync`: ratio of samples/s with the slow worker (ideal: 3.25);
             `async_over_sync_even`: without it. The timer covers the loop of steps, not the
             start of processes, connections and shards. `pull_ms`: milliseconds in which 4
             workers at once fetch weights of several sizes from one process, sent to each anew
             (`value`) or put into the object store once (`reference`, as the shards do above
             100 kB).
scaling      1 to 48 simulated workers on a simulated network, scheduled by the product's
             scheduler (async_simulation.py; nothing is measured): `efficiency_at_48`, and a table
             over bandwidths. Three workers and one shard per node, 100 MB of weights (ResNet-50),
             0.25 s per micro-batch without variation.
training     real training on a simulated clock (async_training.py): ResNet-8 on Fashion-MNIST
             from `--data-root` (layout: comparison_tasks.py) with staleness bounds 0, 1, 4, 16
             and none: the final test accuracy and the staleness of each.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray
import torch

from benchmarks.async_simulation import Network, Simulation
from benchmarks.async_training import final_accuracies
from benchmarks.balanced_training import measure
from benchmarks.common import machine
from raytrain_opt import Job
from raytrain_opt.async_training.actors import ServerHandles, parameter_server
from raytrain_opt.async_training.scheduler import EpochPhase, MicroBatchDone
from raytrain_opt.async_training.worker import RemoteServer
from raytrain_opt.async_training.worker_loop import AsyncTrainer
from raytrain_opt.clock import monotonic_s
from raytrain_opt.cluster.connection import ray_session
from raytrain_opt.data.base import Batch, DataInfo
from raytrain_opt.models import build_model
from raytrain_opt.optim.factory import build_optimizer
from raytrain_opt.recording.recorder import versions
from raytrain_opt.results import AsyncWorkerMetrics, BufferUpdates
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.state import TrainingState, to_cpu_state

WORKERS, SLOWER = 4, 4.0
MICRO_BATCH_SAMPLES = 32
INFO = DataInfo(10, (3, 32, 32), 10_000, 10_000, 0, 0)
PULL_BYTES = (50_000, 500_000, 5_000_000, 50_000_000)
BOUNDS = [0, 1, 4, 16, None]
WORKER_COUNTS = (1, 2, 4, 8, 16, 32, 48)
GBIT_PER_S = (10, 25, 100)
MEGABYTES, MICRO_BATCH_S, WORKERS_PER_NODE = 100, 0.25, 3


def balanced(args: argparse.Namespace) -> dict[str, Any]:
    """Measure balanced and synchronous training."""
    runs = [(mode, case) for case in ("slow", "even", "jitter") for mode in ("sync", "balanced")]
    measured = dict(
        zip(runs, measure(runs, WORKERS, args.balanced_steps, args.share_s), strict=True)
    )
    speeds = {run: result["samples_per_s"] for run, result in measured.items()}
    slow, even = (speeds["balanced", c] / speeds["sync", c] for c in ("slow", "even"))
    return {
        "balanced_over_sync": round(slow, 3),
        "balanced_over_sync_equal_workers": round(even, 3),
        "balanced_over_ideal_jitter": measured["balanced", "jitter"]["busy"],
        "balanced_runs": {f"{mode}_{case}": r for (mode, case), r in measured.items()},
        "share_s": args.share_s,
    }


class Sleeper:
    """A learner whose micro-batches take a fixed time."""

    def __init__(self, job: Job, seconds: float) -> None:
        self.config, self.seconds = LearnerConfig.from_job(job), seconds
        self.model = network(job)

    def begin_micro_batches(self, epoch: int, count: int) -> None: ...

    def micro_batches_at(self, places: Iterator[tuple[int, int]]) -> Iterator[Batch]:
        for _ in places:
            yield Batch(torch.empty(MICRO_BATCH_SAMPLES, 0), torch.zeros(MICRO_BATCH_SAMPLES))

    def add_gradient(self, batch: Batch, place: tuple[int, int]) -> tuple[float, int]:
        time.sleep(self.seconds)
        return 0.0, 0

    def buffers(self, batches: int) -> BufferUpdates:
        return BufferUpdates(batches, {}, {})


class SimulatedWorker:
    """A worker process with one thread, as a Ray actor."""

    def __init__(self, job: Job, index: int) -> None:
        torch.set_num_threads(1)
        self.job, self.index = job, index

    def asynchronous(
        self, handles: ServerHandles, phase: EpochPhase, seconds: float
    ) -> AsyncWorkerMetrics:
        learner: Any = Sleeper(self.job, seconds)
        trainer = AsyncTrainer(learner, len(handles.shards))
        server = RemoteServer(handles, phase.id, self.index, trainer.dtype)
        return trainer.train(phase, server, lambda _: None)

    def pull(self, source: Any, way: str, size: int, times: int) -> float:
        """Return the seconds of `times` fetches, each of new weights."""
        started_s = monotonic_s()
        for version in range(times):
            answer = ray.get(getattr(source, way).remote(size, version))
            weights = ray.get(answer[0]) if way == "reference" else answer
            assert len(weights) == size
        return monotonic_s() - started_s

    def synchronous(self, rendezvous: str, steps: int, seconds: float) -> float:
        """Return the seconds of `steps` steps together with the other workers."""
        import torch.distributed as dist

        gradient = torch.cat([p.detach().flatten() for p in network(self.job).parameters()])
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=self.index, world_size=WORKERS
        )
        dist.all_reduce(gradient)
        dist.barrier()
        started_s = monotonic_s()
        for _ in range(steps):
            time.sleep(seconds)
            dist.all_reduce(gradient)
            gradient /= WORKERS
        duration_s = monotonic_s() - started_s
        dist.destroy_process_group()
        return duration_s


class WeightSource:
    """A process that hands out weights of any size in two ways."""

    def __init__(self) -> None:
        # A reference in a list arrives as a reference; on its own Ray would resolve it.
        self._boxed: dict[int, list[Any]] = {}

    def value(self, size: int, version: int) -> Any:
        return np.ones(size, np.uint8)

    def reference(self, size: int, version: int) -> list[Any]:
        if version not in self._boxed:
            self._boxed = {version: [ray.put(np.ones(size, np.uint8))]}
        return self._boxed[version]


def pull_ms(workers: Sequence[Any], times: int = 20) -> dict[str, dict[str, float]]:
    """Return the median worker's milliseconds per fetch, by size and way."""
    source: Any = ray.remote(WeightSource).options(num_cpus=0).remote()
    fetch_ms: dict[str, dict[str, float]] = {}
    for size in PULL_BYTES:
        for way in ("value", "reference"):
            seconds = ray.get([worker.pull.remote(source, way, size, times) for worker in workers])
            milliseconds = round(1000 * median(seconds) / times, 2)
            fetch_ms.setdefault(f"{size / 1e6:g} MB", {})[way] = milliseconds
    return fetch_ms


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Measure both kinds of training with and without the slow worker."""
    job = Job.model_validate(
        {
            "model": {"name": "resnet8", "args": {"width": 64}},
            "data": "digits",
            "epochs": 1,
            "global_batch_size": WORKERS * MICRO_BATCH_SAMPLES,
            "workers": {"count": WORKERS},
            "parallel": {"mode": "async", "staleness_bound": 16, "shards": args.shards},
        }
    )
    speeds: dict[str, list[float]] = {}
    staleness: dict[str, Any] = {}
    with (
        ray_session(None, verbose=False),
        parameter_server(LearnerConfig.from_job(job), INFO, job.max_restarts) as handles,
    ):
        assert handles is not None
        make: Any = ray.remote(SimulatedWorker).options(num_cpus=0)
        workers = [make.remote(job, index) for index in range(WORKERS)]
        state = ray.put(start_state(job))
        pulls = pull_ms(workers)
        for _ in range(args.repeats):
            for name, slower in (("slow", SLOWER), ("even", 1.0)):
                seconds = [args.seconds] * (WORKERS - 1) + [args.seconds * slower]
                speed, staleness[name] = asynchronous(workers, handles, state, args.steps, seconds)
                speeds.setdefault(f"async_{name}", []).append(speed)
                speeds.setdefault(f"sync_{name}", []).append(
                    synchronous(workers, args.steps, seconds)
                )
                print(rounded(speeds), flush=True)
    medians = {name: median(values) for name, values in speeds.items()}
    return {
        "async_over_sync": round(medians["async_slow"] / medians["sync_slow"], 3),
        "async_over_sync_even": round(medians["async_even"] / medians["sync_even"], 3),
        "samples_per_s": rounded(speeds),
        "staleness": staleness,
        "pull_ms": pulls,
        "micro_batch_s": args.seconds,
        "steps": args.steps,
        "shards": args.shards,
        "simulated_compute": True,
    }


def rounded(speeds: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [round(speed, 1) for speed in values] for name, values in speeds.items()}


def asynchronous(
    workers: Sequence[Any], handles: ServerHandles, state: Any, steps: int, seconds: list[float]
) -> tuple[float, dict[str, object]]:
    """Return samples per second and the staleness of an asynchronous phase."""
    phase = EpochPhase(f"{monotonic_s()}", 1, 0, (0.01,) * steps, WORKERS, 16)
    ray.get(handles.coordinator.begin.remote(phase, handles.shards, [state]))
    ray.get([shard.load.remote(phase, [state]) for shard in handles.shards])
    pairs = zip(workers, seconds, strict=True)
    reports: list[AsyncWorkerMetrics] = ray.get(
        [worker.asynchronous.remote(handles, phase, pause_s) for worker, pause_s in pairs]
    )
    _, totals, staleness = ray.get(handles.coordinator.result.remote())
    duration_s = max(report.duration_s for report in reports)
    samples_per_s: float = totals.samples / duration_s
    return samples_per_s, staleness.to_json()


def synchronous(workers: Sequence[Any], steps: int, seconds: list[float]) -> float:
    """Return samples per second of synchronous training."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = zip(workers, seconds, strict=True)
        durations_s: list[float] = ray.get(
            [
                worker.synchronous.remote(f"{folder}/rendezvous", steps, pause_s)
                for worker, pause_s in pairs
            ]
        )
    return steps * WORKERS * MICRO_BATCH_SAMPLES / max(durations_s)


def network(job: Job) -> torch.nn.Module:
    """Return the network whose weights and gradients travel."""
    return build_model(
        job.model, num_classes=INFO.num_classes, sample_shape=INFO.sample_shape, seed=0
    ).to(memory_format=torch.channels_last)


def start_state(job: Job) -> TrainingState:
    """Return the state before the first step."""
    model = network(job)
    optimizer = build_optimizer(job.optimizer, model, steps_per_epoch=1)
    return to_cpu_state(model.state_dict(), optimizer.state_dict(), {}, copy=True)


def scaling(args: argparse.Namespace) -> dict[str, Any]:
    """Compute the efficiencies on simulated networks."""
    table: list[dict[str, Any]] = [
        {
            "gbit_per_s": gbit_per_s,
            "gradients": gradients,
            "efficiency": {
                workers: round(efficiency(workers, gbit_per_s, size), 3)
                for workers in WORKER_COUNTS
            },
        }
        for gbit_per_s in GBIT_PER_S
        for gradients, size in (("fp32", 1.0), ("bf16", 0.5))
    ]
    row = next(r for r in table if (r["gbit_per_s"], r["gradients"]) == (args.gbit_per_s, "fp32"))
    return {
        "efficiency_at_48": row["efficiency"][48],
        "scaling": table,
        "scaling_gbit_per_s": args.gbit_per_s,
        "scaling_shards_at_48": nodes_of(48),
        "scaling_staleness_bound": 16,
        "paper_efficiency_at_48": 0.625,
    }


def nodes_of(workers: int) -> int:
    """Return the number of nodes that the workers fill; each has a shard."""
    return math.ceil(workers / WORKERS_PER_NODE)


def efficiency(workers: int, gbit_per_s: float, gradient_size: float) -> float:
    """Return the micro-batches per second and worker relative to one worker that never waits.

    `gradient_size`: bytes of the gradients in units of the weights' bytes.
    """
    nodes = nodes_of(workers)
    link = Network(
        nodes,
        nodes,
        weight_bytes=MEGABYTES * 1e6,
        gradient_bytes=MEGABYTES * 1e6 * gradient_size,
        bytes_per_s=gbit_per_s * 1e9 / 8,
    )
    phase = EpochPhase("1.0", 1, 0, (0.1,) * 60, workers, 16)
    run = Simulation(
        phase, [MICRO_BATCH_S] * workers, link, lambda _, index: MicroBatchDone(index, 0, 0, 0, 0)
    )
    return phase.size * MICRO_BATCH_S / (run.run() * workers)


def main() -> None:
    args = _arguments()
    result: dict[str, Any] = {}
    if "balanced" in args.parts:
        result |= balanced(args)
    if "throughput" in args.parts:
        result |= throughput(args)
    if "scaling" in args.parts:
        result |= scaling(args)
    if "training" in args.parts:
        torch.set_num_threads(1)
        result["training"] = final_accuracies(
            args.data_root, BOUNDS, args.epochs, args.samples, args.side
        )
        result["training_data"] = "synthetic" if args.data_root is None else "Fashion-MNIST"
        result["training_epochs"] = args.epochs
    print(json.dumps({**result, "machine": machine(), "versions": versions()}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Asynchronous against synchronous training.")
    names = ("balanced", "throughput", "scaling", "training")
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60, help="of 4 micro-batches each")
    parser.add_argument("--seconds", type=float, default=0.25, help="of a micro-batch")
    parser.add_argument("--balanced-steps", type=int, default=20)
    parser.add_argument("--share-s", type=float, default=1.0, help="of an equal share of a step")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--gbit-per-s", type=int, choices=GBIT_PER_S, default=25)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--samples", type=int, default=3072, help="training images")
    parser.add_argument("--side", type=int, default=28, help="pixels of an image's side")
    return parser.parse_args()


if __name__ == "__main__":
    main()
