"""Real training with a slow worker, on a simulated clock: accuracy and staleness for each bound.

ResNet-8 on Fashion-MNIST, 4 workers, one of which takes four times as long for a share.
Gradients, weights, optimiser, batch normalisation and data are the product's own code, and real;
only the time is simulated (`async_simulation`), so that a run says the same every time, and 4
workers do not share 2 cores. Bound 0 is the synchronous training.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from async_simulation import NoNetwork, Simulation
from comparison_tasks import MADE_UP, Task

from raytrain_opt import Job
from raytrain_opt.data import load_shared
from raytrain_opt.models import build_model
from raytrain_opt.optim.batch_ramp import epoch_steps
from raytrain_opt.search import build_policy
from raytrain_opt.train.async_trainer import AsyncTrainer
from raytrain_opt.train.buffers import moved_on
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.parameter_server import Shard, from_wire, joined
from raytrain_opt.train.share_clock import Done, Update, phase_of
from raytrain_opt.train.state import HostState

WORKERS, SHARDS = 4, 2
SECONDS = (1.0, 1.0, 1.0, 4.0)


def fashion_mnist(samples: int, side: int) -> Task:
    """So many training images of this size; all test images."""
    return Task(f"fashion_mnist_{side}", "fashion_mnist", side, samples, 128, width=8)


def final_accuracies(
    data_root: Path | None, bounds: list[int | None], epochs: int, samples: int, side: int
) -> list[dict[str, Any]]:
    """One training for each bound; without a folder of data, on a few made-up images."""
    task = fashion_mnist(samples, side) if data_root is not None else MADE_UP
    with TemporaryDirectory() as folder:
        data = task.prepare(data_root or Path(), Path(folder))
        return [_trained(task, data, epochs, bound) for bound in bounds]


def _trained(task: Task, data: dict[str, Any], epochs: int, bound: int | None) -> dict[str, Any]:
    schedule = {"policy": "schedule", "shape": "linear", "initial": 0.1, "final": 0.0}
    schedule["warmup"] = {"epochs": 1, "lr": 0.01, "shape": "linear"}  # type: ignore[assignment]
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
        plan = policy.plan(epoch, (), ())
        seconds += run.epoch(epoch, plan.lrs)
        new = torch.tensor(run.simulation.clock.staleness.counts)
        size = max(len(counts), len(new))
        counts = _padded(counts, size) + _padded(new, size)
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
        self.job, shared = job, load_shared(job.data)
        self.learners = [Learner(job, shared, torch.device("cpu")) for _ in range(WORKERS)]
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
        self.shards = [Shard(job, model, i, SHARDS, steps) for i, model in enumerate(models)]
        self.state: HostState = self.learners[0].state(copy=True)
        self.trainers = [AsyncTrainer(learner, SHARDS) for learner in self.learners]

    def epoch(self, epoch: int, lrs: tuple[float, ...]) -> float:
        """Train it; simulated seconds."""
        phase = phase_of(self.job, epoch, 0, lrs, 1.0)
        for shard in self.shards:
            shard.load(self.state)
        for trainer in self.trainers:
            trainer.load(self.state)
            trainer.learner.begin_shares(epoch, phase.shares)
        fetched: dict[int, list[torch.Tensor]] = {}
        shares = [0] * WORKERS

        def on_fetch(worker: int) -> None:
            fetched[worker] = [shard.weights.buffer.clone() for shard in self.shards]

        def on_begin(worker: int, share: int) -> Done:
            shares[worker] += 1
            trainer = self.trainers[worker]
            batch = next(trainer.learner.batches_at([phase.place(share)]))
            done, wires = trainer.compute(phase, share, batch, fetched[worker])
            for shard, wire in zip(self.shards, wires, strict=True):
                shard.add(share, from_wire(wire, shard.dtype))
            return done

        def on_update(update: Update) -> None:
            for shard in self.shards:
                shard.apply(update)

        self.simulation = Simulation(phase, SECONDS, NoNetwork(), on_begin, on_update, on_fetch)
        seconds = self.simulation.run()
        buffers = [learner.buffers(n) for learner, n in zip(self.learners, shares, strict=True)]
        moved = moved_on(self.state, buffers, phase.updates)
        self.state = joined(self.state, [shard.state() for shard in self.shards], moved)
        return seconds

    def accuracy(self) -> float:
        """Of the state after the last epoch, on the whole test split."""
        self.trainers[0].load(self.state)
        return self.learners[0].evaluate("test").accuracy
