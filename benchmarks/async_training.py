"""Real training on a simulated clock: the accuracy of each way to train with unequal workers.

Gradients, weights, optimizers, batch normalization and data are the product's own code and real;
only time is simulated, so workers do not compete for the cores of one machine. Asynchronous
training runs through `async_simulation.py`. The synchronous ways are one learner that computes
the micro-batches of all workers: which samples a step has follows from the way, its duration from
`async_environments.py`.

    python -m benchmarks.async_training --data-root FOLDER [--parts equal table] [--cache FILE]

Parts:
equal    equal workers, `--workers` of them, equal epochs: sync and async, each seed and task.
table    4 workers: every way in every environment, at equal epochs and at equal time, which is
         that of `--epochs` epochs of synchronous training by equal workers: as many steps of the
         global batch as then fit, each training with its complete schedule.

Two tasks, `--tasks`: ResNet-8 of width 8 on 2,880 images of Fashion-MNIST at 14 x 14, and of
CIFAR-100's 20 coarse labels at 16 x 16; batch 192, momentum SGD with weight decay 5e-4, an epoch
of warm-up, then linear decay from `--peak-lr` (0.1) to 0. Accuracy on all 10,000 test images, with
statistics of batch normalization from the final weights and the same 1,920 images for every way:
one learner in place of P would update running ones P times as often. `--cache FILE` keeps every
training.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.async_environments import ENVIRONMENTS, WAYS, Environment
from benchmarks.async_simulation import Simulation
from benchmarks.common import machine
from benchmarks.comparison_tasks import Task
from benchmarks.comparison_units import Cache, Result
from raytrain_opt import Job
from raytrain_opt.async_training.scheduler import EpochPhase, Granularity, MicroBatchDone
from raytrain_opt.async_training.weight_shard import (
    WeightShard,
    advance_buffers,
    assemble_state,
    from_wire,
)
from raytrain_opt.async_training.worker_loop import AsyncTrainer
from raytrain_opt.config.learning_rate import SchedulePolicy
from raytrain_opt.data import load_shared_data
from raytrain_opt.models import build_model
from raytrain_opt.optim.schedules import build_schedule
from raytrain_opt.recording.recorder import versions
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches

SHARDS, WORKERS = 2, 4
TASKS = {
    "fashion": Task("fashion_mnist_14", "fashion_mnist", 14, 2880, 192, batch=192),
    "cifar": Task("cifar100_coarse_16", "cifar100_coarse", 16, 2880, 192, batch=192),
}


def schedule_section(peak_lr: float) -> dict[str, Any]:
    """Return an epoch of warm-up and linear decay."""
    return {
        "policy": "schedule",
        "shape": "linear",
        "initial": peak_lr,
        "final": 0.0,
        "warmup": {"epochs": 1, "lr": peak_lr / 10, "shape": "linear"},
    }


@dataclass(frozen=True)
class Training:
    """One training of `steps` steps, with its complete schedule."""

    task: Task
    way: str
    environment: Environment
    steps: int
    seed: int
    optimizer: str = "SGD"
    peak_lr: float = 0.1

    @property
    def key(self) -> str:
        """A digest of everything the result depends on, except versions and machine.

        What synchronous ways compute does not depend on times.
        """
        place: object = asdict(self.environment)
        if self.way != "async":
            place = str(computed(self.way, self.environment))
        setting = [self.steps, self.seed, self.optimizer, self.peak_lr]
        inputs = [asdict(self.task), self.way, place, *setting]
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def about(self) -> dict[str, Any]:
        """What a line of the cache says for people."""
        about = {"task": self.task.name, "way": self.way, "environment": self.environment.name}
        return {**about, "steps": self.steps, "seed": self.seed}


def train(training: Training, data: dict[str, Any]) -> Result:
    """Train; return accuracy in percent and staleness."""
    task, environment, way = training.task, training.environment, training.way
    per_epoch = task.train // task.batch
    epochs = training.steps / per_epoch
    section = schedule_section(training.peak_lr)
    job = Job.model_validate(
        {
            **task.job(
                data,
                math.ceil(epochs),
                training.seed,
                section,
                training.optimizer,
                holds_out=False,
            ),
            "workers": {"count": environment.workers},
            "parallel": {"mode": "async" if way == "async" else "sync"},
            "average": None,
        }
    )
    run: _AsyncRun | _SyncRun = (_AsyncRun if way == "async" else _SyncRun)(job)
    policy = SchedulePolicy.model_validate(section)
    schedule = build_schedule(policy, epochs=epochs, steps_per_epoch=per_epoch)
    lrs = tuple(schedule.lr(step) for step in range(training.steps))
    counts = Counter[int]()
    for epoch, first in enumerate(range(0, training.steps, per_epoch), 1):
        staleness = run.epoch(epoch, lrs[first : first + per_epoch], way, environment)
        counts.update(dict(enumerate(staleness)))
    return {
        "accuracy": round(100 * run.accuracy(), 2),
        "staleness_mean": round(sum(k * n for k, n in counts.items()) / max(1, counts.total()), 2),
        "staleness_max": max(counts, default=0),
    }


class _SyncRun:
    """One learner in this process, for all workers."""

    def __init__(self, job: Job) -> None:
        config = LearnerConfig.from_job(job)
        self.learner = Learner(config, load_shared_data(job.data), torch.device("cpu"))

    def epoch(
        self, epoch: int, lrs: tuple[float, ...], way: str, environment: Environment
    ) -> tuple[int, ...]:
        """Train one epoch; no gradient is stale."""
        self.learner.train(epoch, 0, lrs, computed(way, environment))
        return ()

    def accuracy(self) -> float:
        """Return the accuracy on the test split."""
        return _accuracy(self.learner)


def computed(way: str, environment: Environment) -> MicroBatches:
    """Return the micro-batches of each step whose gradients count."""
    workers = environment.workers
    match way:
        case "without slow":
            return MicroBatches(range(workers - 1), workers - 1)
        case "backup":  # the last gradient is thrown away
            return MicroBatches(range(workers - 1), workers)
        case "balanced":
            count = environment.split * workers
            return MicroBatches(range(count), count)
    return MicroBatches(range(workers), workers)


class _AsyncRun:
    """A learner for each worker, and two shards, in this process."""

    def __init__(self, job: Job) -> None:
        shared, config = load_shared_data(job.data), LearnerConfig.from_job(job)
        learners = [Learner(config, shared, torch.device("cpu")) for _ in range(job.workers.size)]
        self.learner = learners[0]
        info = self.learner.info
        models = [
            build_model(
                job.model,
                num_classes=info.num_classes,
                sample_shape=info.sample_shape,
                seed=job.seed,
            ).to(memory_format=torch.channels_last)
            for _ in range(SHARDS)
        ]
        updates = info.steps_per_epoch(job.global_batch_size) * job.workers.size
        self.shards = [
            WeightShard(job.optimizer, model, i, SHARDS, updates) for i, model in enumerate(models)
        ]
        self.granularity = Granularity(config.async_splits)
        self.state = self.learner.state(copy=True)
        self.trainers = [AsyncTrainer(learner, SHARDS) for learner in learners]

    def epoch(
        self, epoch: int, lrs: tuple[float, ...], way: str, environment: Environment
    ) -> tuple[int, ...]:
        """Train one epoch; return the number of its gradients by staleness."""
        split, seconds = self.granularity.split, environment.clock(epoch)
        phase = EpochPhase(f"{epoch}", epoch, 0, lrs, environment.workers * split, None)
        for shard in self.shards:
            shard.load(self.state, phase)
        for trainer in self.trainers:
            trainer.load(self.state)
            trainer.learner.begin_micro_batches(epoch, phase.micro_batches)
        fetched: dict[int, list[torch.Tensor]] = {}
        gradients: dict[int, list[Any]] = {}
        micro_batches = [0] * environment.workers

        def on_fetch(worker: int) -> None:
            fetched[worker] = [shard.weights_ahead() for shard in self.shards]

        def on_begin(worker: int, number: int) -> MicroBatchDone:
            micro_batches[worker] += 1
            trainer = self.trainers[worker]
            batch = next(trainer.learner.micro_batches_at([phase.index_of(number)]))
            done, gradients[number] = trainer.compute(phase, number, batch, fetched[worker])
            return done

        def on_update(worker: int, number: int, version: int) -> None:
            for shard, wire in zip(self.shards, gradients.pop(number), strict=True):
                shard.apply(number, version, from_wire(wire, shard.dtype))

        simulation = Simulation(
            phase,
            environment.workers,
            lambda worker: seconds(worker) / split,
            environment.network(),
            on_begin,
            on_update,
            on_fetch,
        )
        self.granularity.measured(len(lrs) / simulation.run(), environment.message_s * split)
        buffers = [
            trainer.learner.buffers(count)
            for trainer, count in zip(self.trainers, micro_batches, strict=True)
        ]
        moved = advance_buffers(self.state, buffers, len(lrs))
        self.state = assemble_state(self.state, [shard.state() for shard in self.shards], moved)
        return simulation.clock.staleness.counts

    def accuracy(self) -> float:
        """Return the accuracy of the final state on the test split."""
        self.trainers[0].load(self.state)
        return _accuracy(self.learner)


def _accuracy(learner: Learner) -> float:
    """Return the accuracy with statistics of the same ten global batches for every way."""
    learner.begin_micro_batches(1, 1)
    learner.sync_batch_norm_stats(fresh=True)
    return learner.evaluate("test").means["accuracy"]


# Way, environment and number of steps of a training.
Plan = tuple[str, Environment, int]


def equal(args: argparse.Namespace, steps: int) -> Iterator[Plan]:
    """Yield synchronous and asynchronous training of equal workers."""
    for workers in args.workers:
        for way in ("sync", "async"):
            yield way, Environment("equal", workers), steps


def table(args: argparse.Namespace, steps: int) -> Iterator[Plan]:
    """Yield each way in each environment: all `steps`, and those that fit into the time."""
    for environment in (ENVIRONMENTS[name](WORKERS) for name in args.environments):
        for way in WAYS:
            yield way, environment, steps
            yield way, environment, round(steps * environment.speed(way))


PARTS = {"equal": equal, "table": table}


def rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train what is not in the cache; print and return the rows of the parts."""
    torch.set_num_threads(1)
    cache, rows = Cache([], args.cache), []
    with TemporaryDirectory() as folder:
        for task in (TASKS[name] for name in args.tasks):
            data = task.prepare(args.data_root, Path(folder))
            steps = args.epochs * (task.train // task.batch)
            for way, place, count in (p for part in args.parts for p in PARTS[part](args, steps)):
                results = []
                for seed in args.seeds:
                    training = Training(
                        task, way, place, count, seed, args.optimizer, args.peak_lr
                    )
                    if training not in cache:
                        cache.add(training, train(training, data))
                    results.append(cache[training])
                rows.append({"task": task.name, **summary(way, place, count, results)})
                print(rows[-1], flush=True)
    return rows


def summary(
    way: str, environment: Environment, steps: int, results: list[Result]
) -> dict[str, Any]:
    """Return a row: mean accuracy over the seeds, its spread, and the speed."""
    accuracies = [result["accuracy"] for result in results]
    return {
        "environment": environment.name,
        "workers": environment.workers,
        "way": way,
        "steps": steps,
        "accuracy": round(mean(accuracies), 2),
        "accuracies": accuracies,
        "spread": round(stdev(accuracies), 2) if len(accuracies) > 1 else None,
        "speed": round(environment.speed(way), 3),
        "staleness_mean": results[0]["staleness_mean"],
        "staleness_max": results[0]["staleness_max"],
    }


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line."""
    parser = argparse.ArgumentParser(description="Accuracy with unequal workers.")
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="file that keeps every training")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["equal"])
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 16], help="part equal")
    parser.add_argument(
        "--environments", nargs="+", choices=ENVIRONMENTS, default=list(ENVIRONMENTS)
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--optimizer", default="SGD")
    parser.add_argument("--peak-lr", type=float, default=0.1)
    return parser.parse_args(argv)


def main() -> None:
    result = {"rows": rows(arguments()), "machine": machine(), "versions": versions()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
