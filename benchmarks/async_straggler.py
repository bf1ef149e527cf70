"""Asynchronous against synchronous training where one worker is slow, and with many workers.

    python benchmarks/async_straggler.py [--data-root FOLDER] [--repeats 2] [--parts ...]

Three parts, each with its keys in the JSON object of the last line:

throughput   4 workers, each a process with one thread, one of them 4 x slower. **Their computing
             is simulated**: a share is a sleep of `--seconds`, because 4 real computations on 2
             cores would measure the cores. All else is real: Ray, the product's clock, shards and
             the loop of its workers; gradients and weights of ResNet-8 (width 64, 1.2 million
             parameters) travel. Synchronous is an all-reduce of the same gradient with gloo after
             each such sleep, without an optimiser's step. `async_over_sync`: samples/s, with the
             slow worker (ideal: 3.25); `async_over_sync_even`: without it. The timer covers the
             loop of steps; processes, connections and the shards' start are not in it.
             `pull_ms`: how long 4 workers at a time take to fetch weights of some sizes from one
             process, sent anew to each (`value`), or put into the object store once (`reference`,
             what the shards do above 100 kB).
scaling      1 to 48 simulated workers on a simulated network, decided by the product's clock
             (see async_simulation.py; nothing is measured): `efficiency_at_48`, and a table over
             bandwidths. Three workers a node, a shard on each node, 100 MB of weights (ResNet-50),
             0.25 s for a share, which varies by nothing.
training     real training on a simulated clock (see async_training.py): ResNet-8, Fashion-MNIST
             from `--data-root` (layout: comparison_tasks.py), s in 0, 1, 4, 16 and no bound: final
             test accuracy and staleness of each.
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
from async_simulation import Network, Simulation
from async_training import final_accuracies
from common import machine

from raytrain_opt import Job
from raytrain_opt.clock import monotonic_s
from raytrain_opt.data.base import Batch, DataInfo
from raytrain_opt.models import build_model
from raytrain_opt.optim.build import build_optimizer
from raytrain_opt.pools.async_worker import Remote
from raytrain_opt.pools.session import ray_session
from raytrain_opt.pools.shards import ServerHandles, parameter_server
from raytrain_opt.telemetry.records import versions
from raytrain_opt.train.async_trainer import AsyncTrainer
from raytrain_opt.train.share_clock import Done, Phase
from raytrain_opt.train.state import HostState, to_host
from raytrain_opt.train.totals import Buffers, Report

WORKERS, SLOWER = 4, 4.0
SHARE_SAMPLES = 32
INFO = DataInfo(10, (3, 32, 32), 10_000, 0, 0)
PULL_BYTES = (50_000, 500_000, 5_000_000, 50_000_000)
BOUNDS = [0, 1, 4, 16, None]
WORKER_COUNTS = (1, 2, 4, 8, 16, 32, 48)
GBIT_PER_S = (10, 25, 100)
MEGABYTES, SHARE_S, WORKERS_PER_NODE = 100, 0.25, 3


class Sleeper:
    """A learner whose shares take a fixed time."""

    def __init__(self, job: Job, seconds: float) -> None:
        self.job, self.seconds = job, seconds
        self.model = network(job)

    def begin_shares(self, epoch: int, count: int) -> None: ...

    def batches_at(self, places: Iterator[tuple[int, int]]) -> Iterator[Batch]:
        for _ in places:
            yield Batch(torch.empty(SHARE_SAMPLES, 0), torch.zeros(SHARE_SAMPLES))

    def add_gradient(self, batch: Batch, place: tuple[int, int]) -> tuple[float, int]:
        time.sleep(self.seconds)
        return 0.0, 0

    def buffers(self, batches: int) -> Buffers:
        return Buffers(batches, {}, {})


class SimulatedWorker:
    """A process with one thread, as a Ray actor."""

    def __init__(self, job: Job, index: int) -> None:
        torch.set_num_threads(1)
        self.job, self.index = job, index

    def asynchronous(self, handles: ServerHandles, phase: Phase, seconds: float) -> Report:
        learner: Any = Sleeper(self.job, seconds)
        trainer = AsyncTrainer(learner, len(handles.shards))
        server = Remote(handles, phase.id, self.index, trainer.dtype)
        return trainer.train(phase, server, lambda _: None)

    def pull(self, giver: Any, way: str, size: int, times: int) -> float:
        """Seconds of as many fetches, each of new weights."""
        started_s = monotonic_s()
        for version in range(times):
            found = ray.get(getattr(giver, way).remote(size, version))
            weights = ray.get(found[0]) if way == "reference" else found
            assert len(weights) == size
        return monotonic_s() - started_s

    def synchronous(self, meeting: str, steps: int, seconds: float) -> float:
        """Seconds of `steps` steps, together."""
        import torch.distributed as dist

        gradient = torch.cat([p.detach().flatten() for p in network(self.job).parameters()])
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=self.index, world_size=WORKERS
        )
        dist.all_reduce(gradient)
        dist.barrier()
        started_s = monotonic_s()
        for _ in range(steps):
            time.sleep(seconds)
            dist.all_reduce(gradient)
            gradient /= WORKERS
        took_s = monotonic_s() - started_s
        dist.destroy_process_group()
        return took_s


class Giver:
    """Weights of some size, handed out in two ways."""

    def __init__(self) -> None:
        self._boxed: dict[int, list[Any]] = {}

    def value(self, size: int, version: int) -> Any:
        return np.ones(size, np.uint8)

    def reference(self, size: int, version: int) -> list[Any]:
        if version not in self._boxed:
            self._boxed = {version: [ray.put(np.ones(size, np.uint8))]}
        return self._boxed[version]


def pull_ms(workers: Sequence[Any], times: int = 20) -> dict[str, dict[str, float]]:
    """Milliseconds of one fetch, by size and way; the median worker."""
    giver: Any = ray.remote(Giver).options(num_cpus=0).remote()
    found: dict[str, dict[str, float]] = {}
    for size in PULL_BYTES:
        for way in ("value", "reference"):
            seconds = ray.get([worker.pull.remote(giver, way, size, times) for worker in workers])
            milliseconds = round(1000 * median(seconds) / times, 2)
            found.setdefault(f"{size / 1e6:g} MB", {})[way] = milliseconds
    return found


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Both ways, with and without the slow worker."""
    job = Job.model_validate(
        {
            "model": {"name": "resnet8", "args": {"width": 64}},
            "data": "digits",
            "epochs": 1,
            "global_batch_size": WORKERS * SHARE_SAMPLES,
            "workers": {"count": WORKERS},
            "parallel": {"mode": "async", "staleness_bound": 16, "shards": args.shards},
        }
    )
    speeds: dict[str, list[float]] = {}
    staleness: dict[str, Any] = {}
    with ray_session(None, verbose=False), parameter_server(job, INFO) as handles:
        assert handles is not None
        make: Any = ray.remote(SimulatedWorker).options(num_cpus=0)
        workers = [make.remote(job, index) for index in range(WORKERS)]
        state = ray.put(start_state(job))
        pulls = pull_ms(workers)
        for _ in range(args.repeats):
            for name, slower in (("slow", SLOWER), ("even", 1.0)):
                seconds = [args.seconds] * (WORKERS - 1) + [args.seconds * slower]
                speed, seen = asynchronous(workers, handles, state, args.steps, seconds)
                speeds.setdefault(f"async_{name}", []).append(speed)
                staleness[name] = seen
                speeds.setdefault(f"sync_{name}", []).append(
                    synchronous(workers, args.steps, seconds)
                )
                print({key: [round(v, 1) for v in at] for key, at in speeds.items()}, flush=True)
    middle = {name: median(values) for name, values in speeds.items()}
    return {
        "async_over_sync": round(middle["async_slow"] / middle["sync_slow"], 3),
        "async_over_sync_even": round(middle["async_even"] / middle["sync_even"], 3),
        "samples_per_s": {name: [round(v, 1) for v in at] for name, at in speeds.items()},
        "staleness": staleness,
        "pull_ms": pulls,
        "share_s": args.seconds,
        "steps": args.steps,
        "shards": args.shards,
        "simulated_compute": True,
    }


def asynchronous(
    workers: Sequence[Any], handles: ServerHandles, state: Any, steps: int, seconds: list[float]
) -> tuple[float, dict[str, object]]:
    """Samples per second, and the staleness."""
    phase = Phase(f"{monotonic_s()}", 1, 0, (0.01,) * steps, WORKERS, 16)
    ray.get(handles.clock.begin.remote(phase, handles.shards, [state]))
    ray.get([shard.load.remote(phase, [state]) for shard in handles.shards])
    pairs = zip(workers, seconds, strict=True)
    reports: list[Report] = ray.get(
        [worker.asynchronous.remote(handles, phase, each) for worker, each in pairs]
    )
    _, totals, staleness = ray.get(handles.clock.result.remote())
    took_s = max(report.seconds for report in reports)
    return totals.samples / took_s, staleness.to_record()


def synchronous(workers: Sequence[Any], steps: int, seconds: list[float]) -> float:
    """Samples per second."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = zip(workers, seconds, strict=True)
        took_s = ray.get(
            [worker.synchronous.remote(f"{folder}/meet", steps, each) for worker, each in pairs]
        )
    return steps * WORKERS * SHARE_SAMPLES / max(took_s)


def network(job: Job) -> torch.nn.Module:
    """The one whose weights and gradients travel."""
    return build_model(
        job.model, num_classes=INFO.num_classes, sample_shape=INFO.sample_shape, seed=0
    ).to(memory_format=torch.channels_last)


def start_state(job: Job) -> HostState:
    """Of a training that has not begun."""
    model = network(job)
    optimizer = build_optimizer(job.optimizer, model, steps_per_epoch=1)
    return to_host(model.state_dict(), optimizer.state_dict(), {}, copy=True)


def scaling(args: argparse.Namespace) -> dict[str, Any]:
    """Efficiencies on simulated networks."""
    table = [
        {
            "gbit_per_s": gbit_per_s,
            "gradients": gradients,
            "efficiency": {
                workers: round(efficiency(workers, gbit_per_s, half), 3)
                for workers in WORKER_COUNTS
            },
        }
        for gbit_per_s in GBIT_PER_S
        for gradients, half in (("fp32", 1.0), ("bf16", 0.5))
    ]
    [chosen] = [
        row for row in table if row["gbit_per_s"] == args.gbit_per_s and row["gradients"] == "fp32"
    ]
    return {
        "efficiency_at_48": chosen["efficiency"][48],
        "scaling": table,
        "scaling_gbit_per_s": args.gbit_per_s,
        "scaling_shards_at_48": nodes_of(48),
        "scaling_staleness_bound": 16,
        "paper_efficiency_at_48": 0.625,
    }


def nodes_of(workers: int) -> int:
    """As many as they fill, each with a shard."""
    return math.ceil(workers / WORKERS_PER_NODE)


def efficiency(workers: int, gbit_per_s: float, gradient_part: float) -> float:
    """Shares per second and worker, over those of one worker without any wait."""
    nodes = nodes_of(workers)
    link = Network(
        nodes,
        nodes,
        weight_bytes=MEGABYTES * 1e6,
        gradient_bytes=MEGABYTES * 1e6 * gradient_part,
        bytes_per_s=gbit_per_s * 1e9 / 8,
    )
    phase = Phase("1.0", 1, 0, (0.1,) * 60, workers, 16)
    run = Simulation(phase, [SHARE_S] * workers, link, lambda _, share: Done(share, 0, 0, 0, 0))
    return phase.size * SHARE_S / (run.run() * workers)


def main() -> None:
    args = _arguments()
    found: dict[str, Any] = {}
    if "throughput" in args.parts:
        found |= throughput(args)
    if "scaling" in args.parts:
        found |= scaling(args)
    if "training" in args.parts:
        torch.set_num_threads(1)
        found["training"] = final_accuracies(
            args.data_root, BOUNDS, args.epochs, args.samples, args.side
        )
        found["training_data"] = "made up" if args.data_root is None else "Fashion-MNIST"
        found["training_epochs"] = args.epochs
    print(json.dumps({**found, "machine": machine(), "versions": versions()}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Asynchronous against synchronous training.")
    names = ("throughput", "scaling", "training")
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60, help="of 4 shares each")
    parser.add_argument("--seconds", type=float, default=0.25, help="of a share")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--gbit-per-s", type=int, choices=GBIT_PER_S, default=25)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--samples", type=int, default=3072, help="training images")
    parser.add_argument("--side", type=int, default=28, help="pixels")
    return parser.parse_args()


if __name__ == "__main__":
    main()
