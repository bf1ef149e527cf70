"""Muon in data parallelism: ranks share the orthogonalization and hold the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from raytrain_opt.config.schema import Job
from raytrain_opt.data import load_shared_data
from raytrain_opt.optim import muon
from raytrain_opt.results import Steps
from raytrain_opt.train.data_parallel import DataParallel, Parallel
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches
from tests.support.process_group import Results, run_ranks

MICRO_BATCHES = 4
DTYPES = ["float32", "bfloat16"]
LRS = (0.02, 0.05, 0.05)


def network(num_classes: int, sample_shape: tuple[int, ...]) -> nn.Module:
    """Build six filter banks of one shape, another one and a matrix, without BatchNorm."""
    layers: list[nn.Module] = [nn.Conv2d(sample_shape[0], 8, 3, stride=2), nn.GroupNorm(2, 8)]
    for _ in range(6):
        layers += [nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AvgPool2d(3), nn.Flatten(), nn.Linear(8, num_classes))


def job() -> Job:
    muon_args = {"weight_decay": 0.1, "aux_lr_multiplier": 0.5}
    return Job.model_validate(
        {
            "model": network,
            "data": "digits",
            "epochs": 2,
            "global_batch_size": 32,
            "optimizer": {"name": "Muon", "args": muon_args},
            "workers": {"count": MICRO_BATCHES},
        }
    )


def counted(work: list[int]) -> Callable[..., Tensor]:
    """Return `orthogonalize`, which adds the number of its matrices to `work`."""
    original = muon.orthogonalize

    def orthogonalize(matrices: Tensor) -> Tensor:
        work.append(len(matrices))
        return original(matrices)

    return orthogonalize


def train(dtype: torch.dtype, rank: int, world_size: int) -> dict[str, Any]:
    """Train a phase, then a second one twice from the same state."""
    config = LearnerConfig.from_job(job())
    parallel = DataParallel if world_size > 1 else Parallel
    learner = Learner(config, load_shared_data(config.data), torch.device("cpu"), parallel)
    micro_batches = MicroBatches.all(MICRO_BATCHES)
    work: list[int] = []
    with mock.patch.object(muon, "iteration_dtype", return_value=dtype):
        with mock.patch.object(muon, "orthogonalize", counted(work)):
            learner.train(1, Steps(0, LRS), micro_batches)
        middle, ends = learner.state(copy=True), []
        for _ in range(2):
            learner.load(middle)
            learner.train(1, Steps(len(LRS), LRS), micro_batches)
            ends.append(learner.state(copy=True).digest())
    return {"matrices_per_step": sum(work) / len(LRS), "ends": ends}


def run_rank(rank: int, world_size: int, folder: Path) -> Results:
    return {dtype: train(getattr(torch, dtype), rank, world_size) for dtype in DTYPES}


MATRICES = 8


@pytest.fixture(scope="module", params=[2, 4], ids=["two", "four"])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Results]:
    return run_ranks(run_rank, request.param, tmp_path_factory.mktemp("ranks") / "run")


@pytest.fixture(scope="module")
def single_process(tmp_path_factory: pytest.TempPathFactory) -> Results:
    [results] = run_ranks(run_rank, 1, tmp_path_factory.mktemp("one") / "run")
    return results


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ranks_share_the_matrices(
    ranks: list[Results], single_process: Results, dtype: str
) -> None:
    work = [results[dtype]["matrices_per_step"] for results in ranks]
    assert single_process[dtype]["matrices_per_step"] == sum(work) == MATRICES
    assert max(work) == 4  # of one shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ranks_hold_the_bits_of_one_process_and_repeat_them(
    ranks: list[Results], single_process: Results, dtype: str
) -> None:
    digests = {end for results in (*ranks, single_process) for end in results[dtype]["ends"]}
    assert len(digests) == 1
