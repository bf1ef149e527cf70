"""One process of `test_noise`.

Trains with and without measuring gradient norms, and writes the results and this rank's gradients
to `folder`/rank-RANK.pt.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_opt.config.schema import Job
from raytrain_opt.data import load_shared_data
from raytrain_opt.data.in_memory_sets import DatasetArrays
from raytrain_opt.results import Steps
from raytrain_opt.train import gradient_noise
from raytrain_opt.train.data_parallel import distribute
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches
from tests.support.process_group import gloo_group

CPU = torch.device("cpu")
STEPS, CONSTANT_STEPS = 9, 2

RankResults = dict[str, Any]


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


def build_learner(world_size: int, arrays: DatasetArrays | None, changes: RankResults) -> Learner:
    values = {
        "model": plain_net,
        "data": "digits",
        "epochs": 2,
        "global_batch_size": 16 * world_size,
        "workers": {"count": world_size},
        **changes,
    }
    return Learner(LearnerConfig.from_job(Job.model_validate(values)), arrays, CPU, distribute)


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
) -> RankResults:
    """Measure every update at a learning rate of 0, in epoch 2 if `changes` has a batch ramp."""
    gradient_noise.MEASURE_EVERY = 1
    learner = build_learner(world_size, arrays, changes)
    epoch = 2 if learner.config.batch_ramp.steps else 1
    factor = learner.config.batch_ramp.steps[0].factor if learner.config.batch_ramp.steps else 1
    micro_batches = MicroBatches(range(rank, rank + 1), world_size)
    norms = learner.train(epoch, Steps(0, (0.0,) * CONSTANT_STEPS), micro_batches).norms
    size = learner.config.global_batch_size * factor
    return {
        "norms": None if norms is None else vars(norms),
        "gradients": compute_gradients(learner, epoch, micro_batches.split(factor), size),
    }


def train_twice(
    rank: int, world_size: int, arrays: DatasetArrays | None, **changes: Any
) -> RankResults:
    """Train two phases, the second with accumulation; measure every other update."""
    gradient_noise.MEASURE_EVERY = 2
    learner = build_learner(
        world_size, arrays, {"batch_ramp": {"steps": [{"epoch": 2, "factor": 2}]}, **changes}
    )
    micro_batches = MicroBatches(range(rank, rank + 1), world_size)
    first = learner.train(1, Steps(0, (0.05,) * STEPS), micro_batches).norms
    second = learner.train(2, Steps(0, (0.02,) * 2), micro_batches).norms
    return {
        "state": learner.state(copy=True).digest(),
        "weights": [p.detach().clone() for p in learner.model.parameters()],
        "pairs": [0 if norms is None else len(norms.pairs) for norms in (first, second)],
    }


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    arrays = load_shared_data(data_section())
    ramp = {"batch_ramp": {"steps": [{"epoch": 2, "factor": 2}]}}
    with gloo_group(rank, world_size, folder):
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
                train_twice(
                    rank, world_size, arrays, **changes, parallel={**section, "noise_scale": on}
                )
                for on in (True, False)
            ]
            for name, section, changes in (
                ("default", {}, {}),
                ("bf16", {"compression": "bf16"}, {}),
                ("fp16", {}, {"precision": "fp16"}),
                ("batchnorm", {}, {"model": {"name": "small_cnn", "args": {"width": 8}}}),
            )
        }
    torch.save({"constant_weights": constant, "trained": trainings}, folder / f"rank-{rank}.pt")


def data_section() -> Any:
    values = {"model": "small_cnn", "data": "digits", "epochs": 1, "global_batch_size": 8}
    return Job.model_validate(values).data
