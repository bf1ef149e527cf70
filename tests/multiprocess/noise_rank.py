"""One process of `test_noise`: python noise_rank.py RANK WORLD_SIZE FOLDER.

Trains with and without looking at gradients, and leaves what came of it, and this rank's own
gradients, as FOLDER/rank-RANK.pt.
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
from raytrain_opt.train import noise
from raytrain_opt.train.group import distribute, use_threads
from raytrain_opt.train.learner import Learner, Shares

CPU = torch.device("cpu")
STEPS, STILL_STEPS = 9, 2

Found = dict[str, Any]


def plain_net(num_classes: int, sample_shape: tuple[int, ...]) -> nn.Module:
    """The first layer is not trained."""
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


def learner(world_size: int, arrays: Arrays | None, changes: Found) -> Learner:
    values = {
        "model": plain_net,
        "data": "digits",
        "epochs": 2,
        "global_batch_size": 16 * world_size,
        "workers": {"count": world_size},
        **changes,
    }
    return Learner(Job.model_validate(values), arrays, CPU, distribute)


def gradients_by_hand(it: Learner, epoch: int, shares: Shares, size: int) -> list[list[Tensor]]:
    """Of each share of this rank in each step, at the present weights."""
    trained = [p for p in it.model.parameters() if p.requires_grad]
    found: list[list[Tensor]] = []
    batches = it.data.train(epoch, range(STILL_STEPS), shares.mine, shares.count, size)
    for index, batch in enumerate(batches):
        if index % len(shares.mine) == 0:
            found.append([])
        with it.autocast():
            loss = it.loss(it.model(batch.x), batch.y)
        gradients = torch.autograd.grad(loss, trained)
        found[-1].append(torch.cat([each.flatten().double() for each in gradients]))
    return found


def still(rank: int, world_size: int, arrays: Arrays | None, **changes: Any) -> Found:
    """Every update is looked at, at a rate of 0; `changes` may ask for shares in epoch 2."""
    noise.EVERY = 1
    it = learner(world_size, arrays, changes)
    epoch = 2 if it.job.batch_ramp else 1
    factor = it.job.batch_ramp[0].factor if it.job.batch_ramp else 1
    shares = Shares(range(rank, rank + 1), world_size)
    norms = it.train(epoch, 0, (0.0,) * STILL_STEPS, shares).norms
    size = it.job.global_batch_size * factor
    return {
        "norms": None if norms is None else vars(norms),
        "gradients": gradients_by_hand(it, epoch, shares.cut(factor), size),
    }


def trained(rank: int, world_size: int, arrays: Arrays | None, **changes: Any) -> Found:
    """Two phases, the second one with accumulation; every other update is looked at."""
    noise.EVERY = 2
    it = learner(world_size, arrays, {"batch_ramp": [{"epoch": 2, "factor": 2}], **changes})
    shares = Shares(range(rank, rank + 1), world_size)
    first = it.train(1, 0, (0.05,) * STEPS, shares).norms
    second = it.train(2, 0, (0.02,) * 2, shares).norms
    return {
        "state": it.state(copy=True).digest(),
        "weights": [p.detach().clone() for p in it.model.parameters()],
        "pairs": [0 if norms is None else len(norms.pairs) for norms in (first, second)],
    }


def main(rank: int, world_size: int, folder: Path) -> None:
    use_threads(1)
    arrays = load_shared(learner_data())
    ramp = {"batch_ramp": [{"epoch": 2, "factor": 2}]}
    with gloo_group(rank, world_size, folder):
        stills = {
            "plain": still(rank, world_size, arrays),
            "shares": still(rank, world_size, arrays, **ramp),
            "growing": still(rank, world_size, arrays, parallel={"buckets": "growing"}),
            "bf16 messages": still(rank, world_size, arrays, parallel={"compression": "bf16"}),
            "fp16": still(rank, world_size, arrays, precision="fp16"),
        }
        pairs = {
            name: [
                trained(
                    rank, world_size, arrays, **changes, parallel={**section, "noise_scale": on}
                )
                for on in (True, False)
            ]
            for name, section, changes in (
                ("default", {}, {}),
                ("growing", {"buckets": "growing"}, {}),
                ("bf16", {"compression": "bf16"}, {}),
                ("fp16", {}, {"precision": "fp16"}),
                ("batchnorm", {}, {"model": {"name": "small_cnn", "args": {"width": 8}}}),
            )
        }
    torch.save({"still": stills, "trained": pairs}, folder / f"rank-{rank}.pt")


def learner_data() -> Any:
    values = {"model": "small_cnn", "data": "digits", "epochs": 1, "global_batch_size": 8}
    return Job.model_validate(values).data


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
