"""One process of `test_data_parallel`: python rank.py RANK WORLD_SIZE FOLDER.

Does every phase once and leaves what came of it as FOLDER/rank-RANK.pt. The same file with
one process and no group is what the others are compared with.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from ranks import gloo_group
from torch import Tensor, nn

from raytrain_opt.config.schema import Job
from raytrain_opt.data import load_shared
from raytrain_opt.data.array_sets import Arrays
from raytrain_opt.train.group import alone, distribute, use_threads
from raytrain_opt.train.learner import Learner, Shares, reduce_sums

CPU = torch.device("cpu")
WORKERS = 2
FIRST, SECOND = (0.1,) * 6, (0.05,) * 4
ODD_TEST_SIZE = 37
# Batches seen so far, more than float32 can count.
BATCHES_BEFORE = 2**24 + 1


def plain_net(num_classes: int, sample_shape: tuple[int, ...]) -> nn.Module:
    """Without batch normalisation, so that shares do not see each other's statistics."""
    features = 8 * sample_shape[1] * sample_shape[2] // 4
    return nn.Sequential(
        nn.Conv2d(sample_shape[0], 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(features, num_classes),
    )


def job(model: Any, batch: int = 32, workers: int = WORKERS) -> Job:
    return Job.model_validate(
        {
            "model": model,
            "data": "digits",
            "epochs": 2,
            "global_batch_size": batch,
            "workers": {"count": workers},
            "evaluate": {"batch_size_per_worker": 5},
        }
    )


def digits() -> Arrays:
    """The real digits, with a test set that no even number divides."""
    whole = load_shared(job("small_cnn").data)
    assert whole is not None
    test_x, test_y = whole.test_x[:ODD_TEST_SIZE], whole.test_y[:ODD_TEST_SIZE]
    return Arrays(whole.train_x, whole.train_y, test_x, test_y, whole.num_classes)


def buffers(learner: Learner) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in learner.model.named_buffers()}


def evaluated(learner: Learner, rank: int, world_size: int) -> dict[str, Any]:
    part = learner.evaluate("test", rank, world_size)
    sums = [part.samples, part.correct, part.correct_top5, part.loss_sum]
    return {"part": sums, "sum": reduce_sums(sums, CPU)}


def phases(model: Any, arrays: Arrays, rank: int, world_size: int) -> dict[str, Any]:
    """Two phases of training, the second one twice from the same state, and an evaluation."""
    learner = Learner(job(model), arrays, CPU, distribute if world_size > 1 else alone)
    for buffer in learner.model.buffers():
        if not buffer.is_floating_point():
            buffer.fill_(BATCHES_BEFORE)
    mine = range(rank, rank + 1) if world_size > 1 else range(WORKERS)
    shares = Shares(mine, WORKERS)
    totals = learner.train(1, 0, FIRST, shares)
    own = buffers(learner)
    learner.settle_statistics()
    middle = learner.state(copy=True)
    reached = []
    for _ in range(2):
        learner.load(middle)
        learner.train(1, len(FIRST), SECOND, shares)
        learner.settle_statistics()
        reached.append(learner.state(copy=True).digest())
    return {
        "totals": {"samples": totals.samples, "loss_sum": totals.loss_sum},
        "own_buffers": own,
        "middle": middle.digest(),
        "averaged_buffers": {
            name.removeprefix("model."): tensor.tensor()
            for name, tensor in middle.tensors.items()
            if name.removeprefix("model.") in own
        },
        "reached": reached,
        "weights": {name: p.detach().clone() for name, p in learner.model.named_parameters()},
        "evaluated": evaluated(learner, rank, world_size),
    }


def three_shares(arrays: Arrays, rank: int, world_size: int) -> dict[str, Any]:
    """Training that was planned for three workers: one of two has two shares."""
    planned = job(plain_net, batch=33, workers=3)
    learner = Learner(planned, arrays, CPU, distribute if world_size > 1 else alone)
    shares = Shares.of_rank(rank, world_size, 3)
    totals = learner.train(1, 0, FIRST, shares)
    weights = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    return {"samples": totals.samples, "weights": weights}


def main(rank: int, world_size: int, folder: Path) -> None:
    use_threads(1)
    arrays = digits()
    with gloo_group(rank, world_size, folder):
        found = {
            "plain": phases(plain_net, arrays, rank, world_size),
            "small_cnn": phases("small_cnn", arrays, rank, world_size),
            "three_shares": three_shares(arrays, rank, world_size),
            "reduced": reduce_sums([rank + 1.0, 1e15 + rank], CPU),
        }
    torch.save(found, folder / f"rank-{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
