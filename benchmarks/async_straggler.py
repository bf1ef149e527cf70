"""Asynchronous against synchronous training: one slow worker, and many workers.

    python -m benchmarks.async_straggler [--repeats 2] [--parts ...]

Four parts; the JSON object of the last line holds the keys of each.

balanced     `parallel.mode: balanced` against `sync` with the product's learner, 4 workers and
             sleeps in place of computing (balanced_training.py): samples/s with one worker 4 x
             slower, `balanced_over_sync` (ideal: 3.25), with equal ones,
             `balanced_over_sync_equal_workers`, and the fraction of the time in which workers
             compute when each micro-batch takes 1 to 4 times longer at random,
             `balanced_over_ideal_jitter`.
throughput   `--workers` workers, each a process with one thread; one of them is 4 times slower.
             **Their computing is simulated**: a micro-batch is a sleep of `--seconds`, because so
             many real computations on 2 cores would measure the cores. Everything else is real:
             Ray, the product's scheduler, shards and worker loop; gradients and weights of
             ResNet-8 (width 64, 1.2 million parameters) travel. Synchronous training is an
             all-reduce of the same gradient with gloo after each such sleep, without an optimizer
             step; `without_slow` is the same by all workers but the slow one, whose share they
             compute. `async_over_sync`: ratio of samples/s with the slow worker;
             `async_over_sync_even`: without it. `measured_over_simulated`: samples/s of the
             asynchronous runs over those of the simulation with measured costs. The timer covers
             the loop of steps, not the start of processes, connections and shards.
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
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from random import Random
from statistics import median
from typing import Any

import ray
import torch

from benchmarks import async_training
from benchmarks.async_costs import measure_costs
from benchmarks.async_simulation import Costs, Network, Simulation
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
WORKER_COUNTS = (1, 2, 4, 8, 16, 32, 48)
GBIT_PER_S = (10, 25, 100)
MICRO_BATCHES_S = (0.025, 0.05, 0.1, 0.25)
BYTES, WORKERS_PER_NODE = 1e8, 3


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

    def add_gradient(self, batch: Batch, place: tuple[int, int]) -> float:
        time.sleep(self.seconds)
        return 0.0

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

    def synchronous(self, rendezvous: str, steps: int, seconds: float, count: int) -> float:
        """Return the seconds of `steps` steps together with the other of `count` workers."""
        import torch.distributed as dist

        gradient = torch.cat([p.detach().flatten() for p in network(self.job).parameters()])
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=self.index, world_size=count
        )
        dist.all_reduce(gradient)
        dist.barrier()
        started_s = monotonic_s()
        for _ in range(steps):
            time.sleep(seconds)
            dist.all_reduce(gradient)
            gradient /= count
        duration_s = monotonic_s() - started_s
        dist.destroy_process_group()
        return duration_s


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Measure both kinds of training with and without the slow worker."""
    workers: int = args.workers
    cases = {
        "slow": [args.seconds] * (workers - 1) + [args.seconds * SLOWER],
        "even": [args.seconds] * workers,
    }
    runs: dict[str, list[float]] = {}
    staleness: dict[str, Any] = {}
    with (
        ray_session(None, verbose=False),
        worker_processes(job_of(workers, args.shards)) as (actors, handles, state),
    ):
        costs = measure_costs()
        for _ in range(args.repeats):
            for name, seconds in cases.items():
                speed, staleness[name] = asynchronous(actors, handles, state, args.steps, seconds)
                runs.setdefault(f"async_{name}", []).append(speed)
                speed = synchronous(actors, args.steps, seconds)
                runs.setdefault(f"sync_{name}", []).append(speed)
            share = args.seconds * workers / (workers - 1)
            speed = synchronous(actors[:-1], args.steps, [share] * (workers - 1))
            runs.setdefault("without_slow", []).append(speed * workers / (workers - 1))
            print(rounded(runs), flush=True)
    medians = {name: median(values) for name, values in runs.items()}
    size = sum(p.nbytes for p in network(job_of(workers, args.shards)).parameters())
    simulated = {
        name: simulated_samples_per_s(seconds, args.steps, size, args.shards, costs)
        for name, seconds in cases.items()
    }
    return {
        "async_over_sync": round(medians["async_slow"] / medians["sync_slow"], 3),
        "async_over_sync_even": round(medians["async_even"] / medians["sync_even"], 3),
        "measured_over_simulated": {
            name: round(medians[f"async_{name}"] / speed, 3) for name, speed in simulated.items()
        },
        "samples_per_s": rounded(runs),
        "staleness_mean": {name: round(value.mean, 2) for name, value in staleness.items()},
        "costs": asdict(costs),
        "workers": workers,
        "micro_batch_s": args.seconds,
        "steps": args.steps,
        "shards": args.shards,
        "simulated_compute": True,
    }


def job_of(workers: int, shards: int) -> Job:
    """Return the job whose network, shards and micro-batches the workers have."""
    return Job.model_validate(
        {
            "model": {"name": "resnet8", "args": {"width": 64}},
            "data": "digits",
            "epochs": 1,
            "global_batch_size": workers * MICRO_BATCH_SAMPLES,
            "workers": {"count": workers},
            "parallel": {"mode": "async", "shards": shards},
        }
    )


@contextmanager
def worker_processes(job: Job) -> Iterator[tuple[list[Any], ServerHandles, Any]]:
    """Start the job's worker processes and shards; yield their handles and the start state."""
    with parameter_server(LearnerConfig.from_job(job), INFO, job.max_restarts) as handles:
        assert handles is not None
        make: Any = ray.remote(SimulatedWorker).options(num_cpus=0)
        actors = [make.remote(job, index) for index in range(job.workers.size)]
        yield actors, handles, ray.put(start_state(job))


def simulated_samples_per_s(
    seconds: list[float], steps: int, size: int, shards: int, costs: Costs
) -> float:
    """Return samples per second of the simulation, on one node, where messages cost no time."""
    link = Network(1, shards, size, size, 1e12, costs)
    phase = EpochPhase("1.0", 1, 0, (0.1,) * steps, len(seconds), None)
    run = Simulation(phase, len(seconds), seconds.__getitem__, link, micro_batch_done)
    return phase.size * MICRO_BATCH_SAMPLES / run.run()


def micro_batch_done(_worker: int, number: int) -> MicroBatchDone:
    """Return the sums of a micro-batch that nobody computed."""
    return MicroBatchDone(number, 0.0, 0, 0)


def rounded(speeds: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [round(speed, 1) for speed in values] for name, values in speeds.items()}


def asynchronous(
    workers: Sequence[Any], handles: ServerHandles, state: Any, steps: int, seconds: list[float]
) -> tuple[float, dict[str, Any]]:
    """Return samples per second and the staleness of an asynchronous phase."""
    phase = EpochPhase(f"{monotonic_s()}", 1, 0, (0.01,) * steps, len(workers), None)
    ray.get(handles.coordinator.begin.remote(phase, handles.shards, [state]))
    ray.get([shard.load.remote(phase, [state]) for shard in handles.shards])
    pairs = zip(workers, seconds, strict=True)
    reports: list[AsyncWorkerMetrics] = ray.get(
        [worker.asynchronous.remote(handles, phase, pause_s) for worker, pause_s in pairs]
    )
    _, totals, staleness = ray.get(handles.coordinator.result.remote())
    duration_s = max(report.duration_s for report in reports)
    samples_per_s: float = totals.samples / duration_s
    return samples_per_s, staleness


def synchronous(workers: Sequence[Any], steps: int, seconds: list[float]) -> float:
    """Return samples per second of synchronous training."""
    count = len(workers)
    with tempfile.TemporaryDirectory() as folder:
        pairs = zip(workers, seconds, strict=True)
        durations_s: list[float] = ray.get(
            [
                worker.synchronous.remote(f"{folder}/rendezvous", steps, pause_s, count)
                for worker, pause_s in pairs
            ]
        )
    return steps * count * MICRO_BATCH_SAMPLES / max(durations_s)


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
    parser.add_argument("--steps", type=int, default=60, help="of a micro-batch per worker")
    parser.add_argument("--seconds", type=float, default=0.25, help="of a micro-batch")
    parser.add_argument("--balanced-steps", type=int, default=20)
    parser.add_argument("--share-s", type=float, default=1.0, help="of an equal share of a step")
    parser.add_argument("--shards", type=int, default=2)
    args, rest = parser.parse_known_args()
    if rest and "table" not in args.parts:
        parser.error(f"only for the part table: {' '.join(rest)}")
    return args, rest


if __name__ == "__main__":
    main()
