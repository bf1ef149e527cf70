"""Gradient norms of two processes, against norms of the ranks' gradients.

Measuring them changes no bit of the training. All cases run once.
"""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raytrain_opt.config.schema import Job
from raytrain_opt.data import load_shared_data
from raytrain_opt.data.in_memory_sets import DatasetArrays
from raytrain_opt.results import Steps
from raytrain_opt.train import gradient_noise
from raytrain_opt.train.data_parallel import DataParallel
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches
from tests.support.process_group import Results, run_ranks

CPU = torch.device("cpu")
STEPS, CONSTANT_STEPS = 9, 2


def plain_net(num_classes: int, sample_shape: tuple[int, ...]) -> nn.Module:
    """Build a model whose first layer is frozen."""
    net = nn.Sequential(
        nn.Conv2d(sample_shape[0], 8, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(8 * sample_shape[1] * sample_shape[2], 100),
        nn.Tanh(),
        nn.Linear(100, num_classes),
    )
    for parameter in net[0].parameters():
        parameter.requires_grad = False
    return net


def build_learner(world_size: int, arrays: DatasetArrays | None, changes: Results) -> Learner:
    values = {
        "model": plain_net,
        "data": "digits",
        "epochs": 2,
        "global_batch_size": 16 * world_size,
        "workers": {"count": world_size},
        **changes,
    }
    return Learner(LearnerConfig.from_job(Job.model_validate(values)), arrays, CPU, DataParallel)


def compute_gradients(
    learner: Learner, epoch: int, micro_batches: MicroBatches, size: int
) -> list[list[Tensor]]:
    """Return the gradients of this rank's micro-batches: [step][micro-batch]."""
    trained = [p for p in learner.model.parameters() if p.requires_grad]
    gradients_by_step: list[list[Tensor]] = []
    batches = learner.data.train_batches(
        epoch, product(range(CONSTANT_STEPS), micro_batches.indices), micro_batches.count, size
    )
    for index, batch in enumerate(batches):
        if index % len(micro_batches.indices) == 0:
            gradients_by_step.append([])
        with learner.autocast():
            loss = learner.task.training_loss(learner.model, batch.content)
        gradients = torch.autograd.grad(loss, trained)
        gradients_by_step[-1].append(torch.cat([g.flatten().double() for g in gradients]))
    return gradients_by_step


def measure_constant_weights(
    rank: int, world_size: int, arrays: DatasetArrays | None, **changes: Any
) -> Results:
    """Measure every update at a learning rate of 0, in epoch 2 if `changes` has a batch ramp."""
    gradient_noise.MEASURE_EVERY = 1
    learner = build_learner(world_size, arrays, changes)
    epoch = 2 if learner.config.batch_ramp else 1
    factor = learner.config.batch_ramp[0].factor if learner.config.batch_ramp else 1
    micro_batches = MicroBatches.all(world_size)
    norms = learner.train(epoch, Steps(0, (0.0,) * CONSTANT_STEPS), micro_batches).norms
    size = learner.config.global_batch_size * factor
    own = MicroBatches(range(rank, rank + 1), world_size)
    return {
        "norms": None if norms is None else vars(norms),
        "gradients": compute_gradients(learner, epoch, own.split(factor), size),
    }


def train_twice(
    rank: int, world_size: int, arrays: DatasetArrays | None, every: Any, **changes: Any
) -> Results:
    """Train two phases, the second with accumulation; measure one of `every` updates."""
    gradient_noise.MEASURE_EVERY = every
    learner = build_learner(
        world_size, arrays, {"batch_ramp": [{"epoch": 2, "factor": 2}], **changes}
    )
    micro_batches = MicroBatches.all(world_size)
    first = learner.train(1, Steps(0, (0.05,) * STEPS), micro_batches).norms
    second = learner.train(2, Steps(0, (0.02,) * 2), micro_batches).norms
    return {
        "state": learner.state(copy=True).digest(),
        "weights": [p.detach().clone() for p in learner.model.parameters()],
        "pairs": [0 if norms is None else len(norms.pairs) for norms in (first, second)],
    }


def run_rank(rank: int, world_size: int, folder: Path) -> Results:
    arrays = load_shared_data(data_section())
    ramp = {"batch_ramp": [{"epoch": 2, "factor": 2}]}
    constant = {
        "plain": measure_constant_weights(rank, world_size, arrays),
        "accumulation": measure_constant_weights(rank, world_size, arrays, **ramp),
        "bf16 messages": measure_constant_weights(
            rank, world_size, arrays, parallel={"compression": "bf16"}
        ),
        "fp16": measure_constant_weights(rank, world_size, arrays, precision="fp16"),
    }
    trainings = {
        name: [
            train_twice(rank, world_size, arrays, every, **changes, parallel=section)
            for every in (2, math.nan)  # never
        ]
        for name, section, changes in (
            ("bf16", {"compression": "bf16"}, {"precision": "fp16"}),
            ("batchnorm", {}, {"model": {"name": "small_cnn", "args": {"width": 8}}}),
        )
    }
    return {"constant_weights": constant, "trained": trainings}


def data_section() -> Any:
    values = {"model": "small_cnn", "data": "digits", "epochs": 1, "global_batch_size": 8}
    return Job.model_validate(values).data


CONSTANT_STEPS = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    return run_ranks(run_rank, 2, tmp_path_factory.mktemp("ranks") / "run")


@pytest.mark.parametrize(
    ("case", "micro_batches", "error"),
    [
        ("plain", 1, 1e-5),
        ("accumulation", 2, 1e-5),
        # Only the mean over the ranks was sent in bf16.
        ("bf16 messages", 1, 1e-2),
        ("fp16", 1, 1e-2),
    ],
)
def test_norms_equal_the_norms_of_all_gradients(
    ranks: list[Results], case: str, micro_batches: int, error: float
) -> None:
    per_rank = 16
    for results in ranks:
        norms = results["constant_weights"][case]["norms"]
        assert norms["small_batch"] == per_rank
        assert norms["big_batch"] == per_rank * micro_batches * len(ranks)
        assert len(norms["pairs"]) == CONSTANT_STEPS
        for step, pair in enumerate(norms["pairs"]):
            gradients = [
                g for rank in ranks for g in rank["constant_weights"][case]["gradients"][step]
            ]
            assert len(gradients) == micro_batches * len(ranks)
            small_norm = sum(float(g.square().sum()) for g in gradients) / len(gradients)
            big_norm = float(torch.stack(gradients).mean(dim=0).square().sum())
            assert pair == pytest.approx((small_norm, big_norm), rel=error)
            assert big_norm < 0.99 * small_norm


def test_all_ranks_get_the_same(ranks: list[Results]) -> None:
    for case in ranks[0]["constant_weights"]:
        assert all(
            r["constant_weights"][case]["norms"] == ranks[0]["constant_weights"][case]["norms"]
            for r in ranks
        )


@pytest.mark.parametrize("case", ["bf16", "batchnorm"])
def test_measuring_does_not_change_a_bit_of_the_training(ranks: list[Results], case: str) -> None:
    for results in ranks:
        measured, plain = results["trained"][case]
        assert measured["state"] == plain["state"]
        for weight, plain_weight in zip(measured["weights"], plain["weights"], strict=True):
            assert torch.equal(weight, plain_weight)
        assert measured["pairs"] == [5, 1]
        assert plain["pairs"] == [0, 0]
