"""The error of an ensemble against its members (Sato): of several seeds, of one run's checkpoints.

    python -m benchmarks.ensemble --data-root FOLDER [--seeds 0 1 2] [--epochs 8]

ResNet-8 of width 8 on 3,072 images of CIFAR-100 (100 classes) at 16 x 16; batch 96, momentum SGD,
an epoch of warm-up, then linear decay from 0.1; top-5 and top-1 error on all 10,000 test images,
by the functions of `raytrain-opt evaluate --ensemble`. One process, no Ray. The checkpoints of a
run are those after its last epochs, as many as there are seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.async_training import schedule_section
from benchmarks.common import machine
from benchmarks.comparison_tasks import SYNTHETIC, Task
from raytrain_opt import Job
from raytrain_opt.commands.evaluate import Predictions, average_predictions, error_rates, predict
from raytrain_opt.data import load_shared_data
from raytrain_opt.optim.epoch_steps import epoch_steps
from raytrain_opt.recording.recorder import versions
from raytrain_opt.search.factory import build_policy
from raytrain_opt.search.policy import History, TrainEpoch
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches

TASK = Task("cifar100_fine_16", "cifar100_fine", 16, 3072, 96, batch=96)


def train(
    task: Task, data: dict[str, Any], epochs: int, seed: int, kept: int
) -> list[Predictions]:
    """Train once; return the predictions after each of the last `kept` epochs."""
    values = task.job(data, epochs, seed, schedule_section(0.1), holds_out=False)
    job = Job.model_validate({**values, "average": None})
    learner = Learner(LearnerConfig.from_job(job), load_shared_data(job.data), torch.device("cpu"))
    policy = build_policy(job, epoch_steps(learner.info.train_size, job.global_batch_size))
    predictions = []
    for epoch in range(1, epochs + 1):
        action = policy.next(epoch, History())
        assert isinstance(action, TrainEpoch)
        learner.train(epoch, 0, action.lrs, MicroBatches(range(1), 1))
        if epoch > epochs - kept:
            predictions.append(predict(learner))
    return predictions


def compare(members: Sequence[Predictions]) -> dict[str, Any]:
    """Return the error rates in percent of each member, their mean, and the ensemble's."""
    rates = [error_rates(member) for member in members]
    ensemble = error_rates(average_predictions(members))
    return {
        name: {
            "members": [round(100 * getattr(rate, name), 2) for rate in rates],
            "mean": round(100 * mean(getattr(rate, name) for rate in rates), 2),
            "ensemble": round(100 * getattr(ensemble, name), 2),
        }
        for name in ("top5_error", "top1_error")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Ensembles against their members.")
    parser.add_argument("--data-root", type=Path, help="without: a few synthetic images")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    task = SYNTHETIC if args.data_root is None else TASK
    with TemporaryDirectory() as folder:
        data = task.prepare(args.data_root or Path(), Path(folder))
        kept = min(args.epochs, len(args.seeds))
        runs = [train(task, data, args.epochs, seed, kept) for seed in args.seeds]
    result = {
        "seeds": compare([run[-1] for run in runs]),
        "checkpoints": [compare(run) for run in runs],
        "all": compare([member for run in runs for member in run]),
    }
    print(json.dumps({**result, "machine": machine(), "versions": versions()}))


if __name__ == "__main__":
    main()
