"""torch's own compiler on two processes: against eager steps, and a resume."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raytrain_opt.config.schema import Compile, Job
from raytrain_opt.data import load_shared_data
from raytrain_opt.results import Steps
from raytrain_opt.train.data_parallel import DataParallel
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches
from tests.support.process_group import Results, run_ranks

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
    return Learner(LearnerConfig.from_job(job), load_shared_data(job.data), device, DataParallel)


def run_rank(rank: int, world_size: int, folder: Path) -> Results:
    """Train eagerly and compiled, and leave the state after two steps; or continue from it."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.parent / "cache")
    own = MicroBatches.all(MICRO_BATCHES)
    middle, compiled = folder.parent / f"middle-{rank}.pkl", learner("default", world_size)
    results: Results = {}
    if middle.is_file():
        compiled.load(pickle.loads(middle.read_bytes()))
    else:
        for trained in (learner("none", world_size), compiled):
            results[trained.compiled] = {
                "loss": trained.train(1, Steps(0, LRS), own).loss,
                "weights": [p.detach().clone() for p in trained.model.parameters()],
            }
        middle.write_bytes(pickle.dumps(compiled.state(copy=True)))
    compiled.train(1, Steps(2, LRS), own)
    return results | {
        "end": compiled.state(copy=True).digest(),
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }


pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """The results by rank of an uninterrupted run and of one that continues it."""
    folder = tmp_path_factory.mktemp("compile")
    names = ("uninterrupted", "continued")
    return [run_ranks(run_rank, 2, folder / name) for name in names]


def test_compiled_steps_equal_eager_ones_within_rounding(runs: list[list[dict[str, Any]]]) -> None:
    for rank in runs[0]:
        eager, compiled = rank["none"], rank["default"]
        assert compiled["loss"] == pytest.approx(eager["loss"], rel=1e-4)
        torch.testing.assert_close(compiled["weights"], eager["weights"], rtol=1e-4, atol=1e-5)


def test_a_compiled_run_resumes_bit_by_bit_in_new_processes(
    runs: list[list[dict[str, Any]]],
) -> None:
    for uninterrupted, continued in zip(*runs, strict=True):
        assert continued["graphs"] > 0
        assert continued["end"] == uninterrupted["end"]
