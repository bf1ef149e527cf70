"""Real training on a simulated clock: the accuracy of each way to train with unequal workers.

Gradients, weights, optimizers, batch normalization and data are the product's own code and real;
only time is simulated, so workers do not compete for the cores of one machine. Asynchronous
training runs through `async_simulation.py`. The synchronous ways are one learner that computes
the micro-batches of all workers: which samples a step has follows from the way, its duration from
`async_environments.py`.

    python -m benchmarks.async_training --data-root FOLDER [--parts equal table]

Parts:
equal    equal workers, `--workers` of them, equal epochs: sync and async, each seed and task.
table    4 workers: every way in every environment, at equal epochs and at equal time, which is
         that of `--epochs` epochs of synchronous training by equal workers.

Two tasks, `--tasks`: ResNet-8 of width 8 on 2,880 images of Fashion-MNIST at 14 x 14, and of
CIFAR-100's 20 coarse labels at 16 x 16; batch 192, momentum SGD with weight decay 5e-4, an epoch
of warm-up, then linear decay from 0.1 to 0. Accuracy on all 10,000 test images, with statistics of
batch normalization from the final weights: one learner in place of P would update running ones P
times as often.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.async_environments import ENVIRONMENTS, WAYS, Environment, steps_s
from benchmarks.async_simulation import Simulation
from benchmarks.common import machine
from benchmarks.comparison_tasks import Task
from raytrain_opt import Job
from raytrain_opt.async_training.buffer_pooling import advance_buffers
from raytrain_opt.async_training.scheduler import EpochPhase, MicroBatchDone
from raytrain_opt.async_training.weight_shard import WeightShard, assemble_state, from_wire
from raytrain_opt.async_training.worker_loop import AsyncTrainer
from raytrain_opt.data import load_shared_data
from raytrain_opt.models import build_model
from raytrain_opt.optim.epoch_steps import epoch_steps
from raytrain_opt.recording.recorder import versions
from raytrain_opt.search.factory import build_policy
from raytrain_opt.search.policy import History, TrainEpoch
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches

SHARDS, WORKERS = 2, 4
TASKS = {
    "fashion": Task("fashion_mnist_14", "fashion_mnist", 14, 2880, 192, batch=192),
    "cifar": Task("cifar100_coarse_16", "cifar100_coarse", 16, 2880, 192, batch=192),
}
SCHEDULE = {
    "policy": "schedule",
    "shape": "linear",
    "initial": 0.1,
    "final": 0.0,
    "warmup": {"epochs": 1, "lr": 0.01, "shape": "linear"},
}


def train(
    task: Task,
    data: dict[str, Any],
    way: str,
    environment: Environment,
    epochs: int,
    seed: int,
    optimizer: str = "SGD",
) -> dict[str, Any]:
    """Train in this way; return accuracy, simulated seconds and staleness."""
    job = Job.model_validate(
        {
            **task.job(data, epochs, seed, SCHEDULE, optimizer, holds_out=False),
            "workers": {"count": environment.workers},
            "parallel": {"mode": "async" if way == "async" else "sync"},
            "average": None,
        }
    )
    run: _AsyncRun | _SyncRun = (_AsyncRun if way == "async" else _SyncRun)(job)
    policy = build_policy(job, epoch_steps(run.learner.info.train_size, job.global_batch_size))
    simulated_s, counts = 0.0, Counter[int]()
    for epoch in range(1, epochs + 1):
        action = policy.next(epoch, History())
        assert isinstance(action, TrainEpoch)
        epoch_s, staleness = run.epoch(epoch, action.lrs, way, environment)
        simulated_s += epoch_s
        counts.update(dict(enumerate(staleness)))
    return {
        "way": way,
        "environment": environment.name,
        "workers": environment.workers,
        "epochs": epochs,
        "seed": seed,
        "accuracy": round(100 * run.accuracy(), 2),
        "simulated_s": round(simulated_s, 1),
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
    ) -> tuple[float, tuple[int, ...]]:
        """Train one epoch; return its simulated seconds."""
        self.learner.train(epoch, 0, lrs, computed(way, environment.workers))
        return steps_s(way, environment, epoch, len(lrs)), ()

    def accuracy(self) -> float:
        """Return the accuracy on the test split."""
        return _accuracy(self.learner)


def computed(way: str, workers: int) -> MicroBatches:
    """Return the micro-batches of each step whose gradients count."""
    match way:
        case "without slow":
            return MicroBatches(range(workers - 1), workers - 1)
        case "backup":  # the last gradient is thrown away
            return MicroBatches(range(workers - 1), workers)
        case "balanced":
            return MicroBatches(range(4 * workers), 4 * workers)
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
        self.state = self.learner.state(copy=True)
        self.trainers = [AsyncTrainer(learner, SHARDS) for learner in learners]

    def epoch(
        self, epoch: int, lrs: tuple[float, ...], way: str, environment: Environment
    ) -> tuple[float, tuple[int, ...]]:
        """Train one epoch; return its simulated seconds and the staleness of its gradients."""
        phase = EpochPhase(f"{epoch}", epoch, 0, lrs, environment.workers, None)
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
            environment.clock(epoch),
            environment.network(),
            on_begin,
            on_update,
            on_fetch,
        )
        epoch_s = simulation.run()
        buffers = [
            trainer.learner.buffers(count)
            for trainer, count in zip(self.trainers, micro_batches, strict=True)
        ]
        moved = advance_buffers(self.state, buffers, len(lrs))
        self.state = assemble_state(self.state, [shard.state() for shard in self.shards], moved)
        return epoch_s, simulation.clock.staleness.counts

    def accuracy(self) -> float:
        """Return the accuracy of the final state on the test split."""
        self.trainers[0].load(self.state)
        return _accuracy(self.learner)


def _accuracy(learner: Learner) -> float:
    learner.sync_batch_norm_stats(fresh=True)
    return learner.evaluate("test").means["accuracy"]


# Way, environment and number of epochs of a training.
Plan = tuple[str, Environment, int]


def equal(args: argparse.Namespace) -> Iterator[Plan]:
    """Yield synchronous and asynchronous training of equal workers."""
    for workers in args.workers:
        for way in ("sync", "async"):
            yield way, Environment("equal", workers), args.epochs


def table(args: argparse.Namespace) -> Iterator[Plan]:
    """Yield each way in each environment: `--epochs` epochs, and those that fit into the time.

    What is computed does not depend on the environment, except with async.
    """
    for environment in (ENVIRONMENTS[name](WORKERS) for name in args.environments):
        for way in WAYS:
            yield way, environment, args.epochs
            yield way, environment, max(2, round(args.epochs * environment.speed(way)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy with unequal workers.")
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=("equal", "table"), default=["equal"])
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 16], help="part equal")
    parser.add_argument(
        "--environments", nargs="+", choices=ENVIRONMENTS, default=list(ENVIRONMENTS)
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--optimizer", default="SGD")
    args = parser.parse_args()
    torch.set_num_threads(1)
    plans = [plan for part in args.parts for plan in {"equal": equal, "table": table}[part](args)]
    trained: dict[tuple[object, ...], dict[str, Any]] = {}
    rows = []
    with TemporaryDirectory() as folder:
        for name in args.tasks:
            data = TASKS[name].prepare(args.data_root, Path(folder))
            for way, environment, epochs in plans:
                results = []
                for seed in args.seeds:
                    place = environment if way == "async" else environment.workers
                    key = (name, way, place, epochs, seed)
                    if key not in trained:
                        trained[key] = train(
                            TASKS[name], data, way, environment, epochs, seed, args.optimizer
                        )
                    results.append(trained[key])
                rows.append({"task": name, **summary(way, environment, epochs, results)})
                print(rows[-1], flush=True)
    print(json.dumps({"rows": rows, "machine": machine(), "versions": versions()}))


def summary(
    way: str, environment: Environment, epochs: int, results: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a row: mean accuracy over the seeds, its spread, and the speed."""
    accuracies = [result["accuracy"] for result in results]
    return {
        "environment": environment.name,
        "workers": environment.workers,
        "way": way,
        "epochs": epochs,
        "accuracy": round(mean(accuracies), 2),
        "accuracies": accuracies,
        "spread": round(stdev(accuracies), 2) if len(accuracies) > 1 else None,
        "speed": round(environment.speed(way), 3),
        "staleness_mean": results[0]["staleness_mean"],
        "staleness_max": results[0]["staleness_max"],
    }


if __name__ == "__main__":
    main()
