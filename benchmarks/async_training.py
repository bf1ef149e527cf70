"""Real training with a slow worker on a simulated clock: accuracy and staleness for each bound.

ResNet-8 on Fashion-MNIST with 4 workers, one of which takes four times as long per micro-batch.
Gradients, weights, optimizer, batch normalization and data are the product's own code and real;
only time is simulated (async_simulation.py), so every run gives the same figures and 4 workers
do not compete for 2 cores. Bound 0 is synchronous training.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.async_simulation import NoNetwork, Simulation
from benchmarks.comparison_tasks import SYNTHETIC, Task
from raytrain_opt import Job
from raytrain_opt.async_training.buffer_pooling import advance_buffers
from raytrain_opt.async_training.scheduler import MicroBatchDone, Update, epoch_phase
from raytrain_opt.async_training.weight_shard import WeightShard, assemble_state, from_wire
from raytrain_opt.async_training.worker_loop import AsyncTrainer
from raytrain_opt.data import load_shared_data
from raytrain_opt.models import build_model
from raytrain_opt.optim.epoch_steps import epoch_steps
from raytrain_opt.search.factory import build_policy
from raytrain_opt.search.policy import History, TrainEpoch
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.state import TrainingState

WORKERS, SHARDS = 4, 2
SECONDS = (1.0, 1.0, 1.0, 4.0)


def fashion_mnist(samples: int, side: int) -> Task:
    """Return a task with `samples` training images of side x side pixels and all test images."""
    return Task(f"fashion_mnist_{side}", "fashion_mnist", side, samples, 128, width=8)


def final_accuracies(
    data_root: Path | None, bounds: list[int | None], epochs: int, samples: int, side: int
) -> list[dict[str, Any]]:
    """Train once for each bound; without a data folder, on a few synthetic images."""
    task = fashion_mnist(samples, side) if data_root is not None else SYNTHETIC
    with TemporaryDirectory() as folder:
        data = task.prepare(data_root or Path(), Path(folder))
        return [_trained(task, data, epochs, bound) for bound in bounds]


def _trained(task: Task, data: dict[str, Any], epochs: int, bound: int | None) -> dict[str, Any]:
    schedule = {
        "policy": "schedule",
        "shape": "linear",
        "initial": 0.1,
        "final": 0.0,
        "warmup": {"epochs": 1, "lr": 0.01, "shape": "linear"},
    }
    job = Job.model_validate(
        {
            **task.job(data, epochs, 0, schedule),
            "workers": {"count": WORKERS},
            "parallel": {"mode": "async", "staleness_bound": bound},
        }
    )
    run = _Run(job)
    steps = epoch_steps(run.learners[0].info.train_size, job.global_batch_size)
    policy = build_policy(job, steps)
    seconds, counts = 0.0, torch.zeros(0, dtype=torch.int64)
    for epoch in range(1, epochs + 1):
        action = policy.next(epoch, History())
        assert isinstance(action, TrainEpoch)
        seconds += run.epoch(epoch, action.lrs)
        epoch_counts = torch.tensor(run.simulation.clock.staleness.counts)
        size = max(len(counts), len(epoch_counts))
        counts = _padded(counts, size) + _padded(epoch_counts, size)
    mean = float((counts * torch.arange(len(counts))).sum() / counts.sum())
    result = {
        "staleness_bound": bound,
        "test_accuracy": round(run.accuracy(), 4),
        "train_loss": round(run.simulation.clock.totals.loss, 4),
        "staleness_mean": round(mean, 3),
        "staleness_max": len(counts) - 1,
        "simulated_seconds": seconds,
    }
    print(result, flush=True)
    return result


def _padded(counts: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(counts, (0, size - len(counts)))


class _Run:
    """Four learners and two shards in this process."""

    def __init__(self, job: Job) -> None:
        self.job, shared = job, load_shared_data(job.data)
        self.learners = [
            Learner(LearnerConfig.from_job(job), shared, torch.device("cpu"))
            for _ in range(WORKERS)
        ]
        info = self.learners[0].info
        models = [
            build_model(
                job.model,
                num_classes=info.num_classes,
                sample_shape=info.sample_shape,
                seed=job.seed,
            ).to(memory_format=torch.channels_last)
            for _ in range(SHARDS)
        ]
        steps = info.steps_per_epoch(job.global_batch_size)
        self.shards = [
            WeightShard(job.optimizer, model, i, SHARDS, steps) for i, model in enumerate(models)
        ]
        self.state: TrainingState = self.learners[0].state(copy=True)
        self.trainers = [AsyncTrainer(learner, SHARDS) for learner in self.learners]

    def epoch(self, epoch: int, lrs: tuple[float, ...]) -> float:
        """Train one epoch and return its simulated seconds."""
        phase = epoch_phase(self.learners[0].config, epoch, 0, lrs, 1.0)
        for shard in self.shards:
            shard.load(self.state)
        for trainer in self.trainers:
            trainer.load(self.state)
            trainer.learner.begin_micro_batches(epoch, phase.micro_batches)
        fetched: dict[int, list[torch.Tensor]] = {}
        micro_batches = [0] * WORKERS

        def on_fetch(worker: int) -> None:
            fetched[worker] = [shard.weights.buffer.clone() for shard in self.shards]

        def on_begin(worker: int, index: int) -> MicroBatchDone:
            micro_batches[worker] += 1
            trainer = self.trainers[worker]
            batch = next(trainer.learner.micro_batches_at([phase.index_of(index)]))
            done, wires = trainer.compute(phase, index, batch, fetched[worker])
            for shard, wire in zip(self.shards, wires, strict=True):
                shard.add(index, from_wire(wire, shard.dtype))
            return done

        def on_update(update: Update) -> None:
            for shard in self.shards:
                shard.apply(update)

        self.simulation = Simulation(phase, SECONDS, NoNetwork(), on_begin, on_update, on_fetch)
        seconds = self.simulation.run()
        buffers = [
            learner.buffers(n) for learner, n in zip(self.learners, micro_batches, strict=True)
        ]
        moved = advance_buffers(self.state, buffers, phase.updates)
        self.state = assemble_state(self.state, [shard.state() for shard in self.shards], moved)
        return seconds

    def accuracy(self) -> float:
        """Return the accuracy of the final state on the test split."""
        self.trainers[0].load(self.state)
        return self.learners[0].evaluate("test").accuracy
