"""One process of `test_compile`: a run with torch's own compiler, and one that continues it.

The first run also trains eagerly, and leaves the state after two steps for the second.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raytrain_opt.config.schema import Compile, Job
from raytrain_opt.data import load_shared_data
from raytrain_opt.results import Steps
from raytrain_opt.train.data_parallel import distribute
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches
from tests.support.process_group import gloo_group

MICRO_BATCHES = 4  # two for each process
LRS = (0.1, 0.05)


def net(num_classes: int, sample_shape: tuple[int, ...]) -> nn.Module:
    features = 4 * sample_shape[1] * sample_shape[2]
    return nn.Sequential(
        nn.Conv2d(sample_shape[0], 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(features, num_classes),
    )


def learner(setting: Compile, world_size: int) -> Learner:
    values = {
        "model": net,
        "data": "digits",
        "epochs": 1,
        "global_batch_size": 32,
        "optimizer": {"name": "SGD", "clip_norm": 1.0},
        "compile": setting,
        "workers": {"count": world_size},
    }
    job = Job.model_validate(values)
    device = torch.device("cpu")
    return Learner(LearnerConfig.from_job(job), load_shared_data(job.data), device, distribute)


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.parent / "cache")
    with gloo_group(rank, world_size, folder):
        torch.save(run(rank, world_size, folder.parent), folder / f"rank-{rank}.pt")


def run(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    own = MicroBatches.for_rank(rank, [1.0] * world_size, MICRO_BATCHES)
    middle, compiled = folder / f"middle-{rank}.pkl", learner("default", world_size)
    results: dict[str, Any] = {}
    if middle.is_file():
        compiled.load(pickle.loads(middle.read_bytes()))
    else:
        for trained in (learner("off", world_size), compiled):
            results[trained.compiled] = {
                "loss": trained.train(1, Steps(0, LRS), own).loss,
                "weights": [p.detach().clone() for p in trained.model.parameters()],
            }
        middle.write_bytes(pickle.dumps(compiled.state(copy=True)))
    compiled.train(1, Steps(2, LRS), own)
    counters = torch._dynamo.utils.counters
    return results | {
        "end": compiled.state(copy=True).digest(),
        "graphs": counters["stats"]["unique_graphs"],
        "compiled": counters["inductor"]["fxgraph_cache_miss"],
        "found": counters["inductor"]["fxgraph_cache_hit"],
    }
