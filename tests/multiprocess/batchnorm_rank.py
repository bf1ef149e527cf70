"""One process of `test_batchnorm`: python batchnorm_rank.py RANK WORLD_SIZE FOLDER.

Every entry of what it leaves is one case; "whole" in it is what one process has that computes
the batch of all workers.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from ranks import gloo_group
from torch import Tensor, nn

from raytrain_opt.config.optimizer import BatchNormSection
from raytrain_opt.models.small import small_cnn
from raytrain_opt.train.batchnorm import (
    batches_seen,
    count_positions,
    pool_statistics,
    prepare,
    recalibrate,
)

SAMPLES = 24  # of all workers together, in one batch
STEPS = 5


class SideBySide(nn.Module):
    """Layers that none of the others' normalisation reaches, of 1 to 64 values per sample.

    Behind one another they would see what one worker normalised by its own share.
    """

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.flat = nn.BatchNorm1d(3 * 8 * 8, momentum=momentum)
        self.row = nn.BatchNorm1d(3, momentum=momentum)
        self.image = nn.BatchNorm2d(3, momentum=momentum)
        self.conv = nn.Conv2d(3, 6, 3, stride=2)
        self.after_conv = nn.BatchNorm2d(6, momentum=momentum, affine=False)
        self.volume = nn.BatchNorm3d(3, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        outputs = (
            self.flat(x.flatten(1)),
            self.row(x[:, :, 0]),
            self.image(x),
            self.after_conv(self.conv(x)),
            self.volume(x.reshape(len(x), 3, 2, 4, 8)),
        )
        return torch.cat([output.flatten(1) for output in outputs], 1)


def batch(seed: int, dtype: torch.dtype = torch.float32, around: float = 3.0) -> Tensor:
    """SAMPLES images, each around a value of its own, so that the workers' shares differ."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, 3, 8, 8, dtype=torch.float64, generator=random)
    own = 2 * torch.randn(SAMPLES, 1, 1, 1, dtype=torch.float64, generator=random)
    return (around + x + own).to(dtype)


def share(x: Tensor, rank: int, world_size: int) -> Tensor:
    return x.chunk(world_size)[rank]


def net(momentum: float | None, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return SideBySide(momentum).to(dtype)


def positions_of(model: nn.Module, sample: Tensor) -> dict[str, float]:
    model.eval()
    with count_positions(model) as positions, torch.no_grad():
        model(sample)
    model.train()
    return positions


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


def trained(model: nn.Module, batches: list[Tensor], rank: int, world_size: int) -> dict[str, Any]:
    """Statistics after training forward passes: this worker's, all workers', one process's."""
    whole = deepcopy(model)
    positions, since = positions_of(model, batches[0][:2]), batches_seen(model)
    with torch.no_grad():
        for x in batches:
            model(share(x, rank, world_size))
            whole(x)
    own = buffers(model)
    pool_statistics(model, SAMPLES // world_size, positions, since)
    return {"own": own, "pooled": buffers(model), "whole": buffers(whole)}


def one_forward(rank: int, world_size: int) -> dict[str, Any]:
    return {
        f"{dtype} momentum {momentum} around {around:g}": trained(
            net(momentum, dtype), [batch(2, dtype, around)], rank, world_size
        )
        for dtype in (torch.float32, torch.float64)
        for momentum in (1.0, None)
        for around in (3.0, 300.0)
    }


def behind_one_another(rank: int, world_size: int) -> dict[str, Any]:
    """A real net, and the values that each of its layers had on this worker."""
    torch.manual_seed(3)
    model = small_cnn(num_classes=10, sample_shape=(3, 8, 8))
    model = prepare(model, BatchNormSection(momentum=1.0), world_size=world_size)
    values: dict[str, Tensor] = {}
    positions, since = positions_of(model, batch(2)[:2]), batches_seen(model)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.register_forward_pre_hook(lambda _, x, name=name: values.update({name: x[0]}))
    with torch.no_grad():
        model(share(batch(2), rank, world_size))
    pool_statistics(model, SAMPLES // world_size, positions, since)
    return {"values": values, "pooled": buffers(model)}


def pooled_again(rank: int, world_size: int) -> dict[str, Any]:
    """Nothing was trained since: the workers agree already."""
    model = net(0.1)
    positions = positions_of(model, batch(2)[:2])
    found = trained(model, [batch(2)], rank, world_size)
    since = batches_seen(model)
    pool_statistics(model, SAMPLES // world_size, positions, since)
    return {"once": found["pooled"], "twice": buffers(model)}


def by_chance(rank: int, world_size: int) -> dict[str, Any]:
    """Unit normal values in many channels, few per batch, pooled after every few steps."""
    model, rounds, samples = nn.BatchNorm1d(4096, momentum=0.3), 4, 4
    random = torch.Generator().manual_seed(100 + rank)
    positions = positions_of(model, torch.zeros(2, 4096))
    for _ in range(rounds):
        since = batches_seen(model)
        for _ in range(STEPS):
            model(torch.randn(samples, 4096, generator=random))
        pool_statistics(model, samples, positions, since)
    return {"pooled": buffers(model)}


def recalibrated(count: int, rank: int, world_size: int) -> dict[str, Any]:
    """After training on other data, with momenta and weights of its own."""
    model = net(0.1)
    positions = positions_of(model, batch(2)[:2])
    with torch.no_grad():
        model(share(batch(5, around=-4), rank, world_size))
    batches = [batch(10 + index) for index in range(count)]
    recalibrate(model, [share(x, rank, world_size) for x in batches], positions)
    whole, own = net(None), net(None)
    with torch.no_grad():
        for x in batches:
            whole(x)
            own(share(x, rank, world_size))
    return {"own": buffers(own), "pooled": buffers(model), "whole": buffers(whole)}


def other_layers(rank: int, world_size: int) -> dict[str, Any]:
    """Buffers that are the workers' own in every way, next to a BatchNorm layer."""
    model = nn.ModuleDict(
        {
            "norm": nn.BatchNorm1d(3),
            "sync": nn.SyncBatchNorm(3),
            "instance": nn.InstanceNorm1d(3, track_running_stats=True),
        }
    )
    model.register_buffer("low_precision", torch.tensor([rank, 1.0], dtype=torch.bfloat16))
    model.register_buffer("counter", torch.tensor([rank]))
    random = torch.Generator().manual_seed(rank)
    for name, value in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            value.copy_(torch.rand(3, generator=random))
    own = buffers(model)
    pool_statistics(model, 8, {"norm": 1.0, "sync": 1.0}, batches_seen(model))
    return {"own": own, "pooled": buffers(model)}


def frozen(rank: int, world_size: int) -> dict[str, Any]:
    """A layer that was in evaluation mode, and pooling over and over."""
    model = net(0.1)
    before = buffers(model)
    positions = positions_of(model, batch(2)[:2])
    for _ in range(STEPS):
        since = batches_seen(model)
        model.get_submodule("flat").eval()
        with torch.no_grad():
            model(share(batch(2), rank, world_size))
        pool_statistics(model, SAMPLES // world_size, positions, since)
    return {"before": before, "pooled": buffers(model)}


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    with gloo_group(rank, world_size, folder):
        found = {
            "one_forward": one_forward(rank, world_size),
            "behind_one_another": behind_one_another(rank, world_size),
            "pooled_again": pooled_again(rank, world_size),
            "by_chance": by_chance(rank, world_size),
            "recalibrated": {count: recalibrated(count, rank, world_size) for count in (1, 3)},
            "other_layers": other_layers(rank, world_size),
            "frozen": frozen(rank, world_size),
        }
    torch.save(found, folder / f"rank-{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
