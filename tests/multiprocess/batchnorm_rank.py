"""One process of `test_batchnorm`.

Runs every case once and writes the results to `folder`/rank-RANK.pt. In the result of a case,
"own" are the buffers of this worker, "pooled" those after pooling, and "reference" those of one
process that computes the full batch.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_opt.config.updates import BatchNormSection
from raytrain_opt.models.small_cnn import small_cnn
from raytrain_opt.train.batch_norm import (
    count_tracked_batches,
    count_values_per_channel,
    pool_statistics,
    prepare_batch_norm,
    recalibrate,
)
from tests.support.process_group import gloo_group

SAMPLES = 24  # of all workers together, in one batch
STEPS = 5


class SideBySide(nn.Module):
    """Parallel BatchNorm layers with 1 to 64 values per channel and sample.

    No layer's input depends on another's normalization: the inputs of stacked layers would be
    normalized with one worker's micro-batch.
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
    """Return SAMPLES images, each with its own mean, so that the workers' statistics differ."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, 3, 8, 8, dtype=torch.float64, generator=random)
    offsets = 2 * torch.randn(SAMPLES, 1, 1, 1, dtype=torch.float64, generator=random)
    return (around + x + offsets).to(dtype)


def micro_batch(x: Tensor, rank: int, world_size: int) -> Tensor:
    return x.chunk(world_size)[rank]


def net(momentum: float | None, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return SideBySide(momentum).to(dtype)


def measure_values_per_channel(model: nn.Module, sample: Tensor) -> dict[str, float]:
    model.eval()
    with count_values_per_channel(model) as values_per_channel, torch.no_grad():
        model(sample)
    model.train()
    return values_per_channel


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


def train_forward(
    model: nn.Module, batches: list[Tensor], rank: int, world_size: int
) -> dict[str, Any]:
    """Run forward passes in training mode; return own, pooled and reference buffers."""
    reference = deepcopy(model)
    values_per_channel = measure_values_per_channel(model, batches[0][:2])
    tracked_before = count_tracked_batches(model)
    with torch.no_grad():
        for x in batches:
            model(micro_batch(x, rank, world_size))
            reference(x)
    own_buffers = buffers(model)
    pool_statistics(model, SAMPLES // world_size, values_per_channel, tracked_before)
    return {"own": own_buffers, "pooled": buffers(model), "reference": buffers(reference)}


def one_forward(rank: int, world_size: int) -> dict[str, Any]:
    return {
        f"{dtype} momentum {momentum} around {around:g}": train_forward(
            net(momentum, dtype), [batch(2, dtype, around)], rank, world_size
        )
        for dtype in (torch.float32, torch.float64)
        for momentum in (1.0, None)
        for around in (3.0, 300.0)
    }


def stacked_layers(rank: int, world_size: int) -> dict[str, Any]:
    """Run a network with stacked layers; return the input of each BatchNorm layer too."""
    torch.manual_seed(3)
    model = small_cnn(num_classes=10, sample_shape=(3, 8, 8))
    model = prepare_batch_norm(model, BatchNormSection(momentum=1.0), world_size=world_size)
    values: dict[str, Tensor] = {}
    values_per_channel = measure_values_per_channel(model, batch(2)[:2])
    tracked_before = count_tracked_batches(model)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.register_forward_pre_hook(lambda _, x, name=name: values.update({name: x[0]}))
    with torch.no_grad():
        model(micro_batch(batch(2), rank, world_size))
    pool_statistics(model, SAMPLES // world_size, values_per_channel, tracked_before)
    return {"values": values, "pooled": buffers(model)}


def pooled_again(rank: int, world_size: int) -> dict[str, Any]:
    """Pool a second time without new batches: the workers agree already."""
    model = net(0.1)
    values_per_channel = measure_values_per_channel(model, batch(2)[:2])
    results = train_forward(model, [batch(2)], rank, world_size)
    tracked_before = count_tracked_batches(model)
    pool_statistics(model, SAMPLES // world_size, values_per_channel, tracked_before)
    return {"once": results["pooled"], "twice": buffers(model)}


def random_micro_batches(rank: int, world_size: int) -> dict[str, Any]:
    """Pool every few steps, with standard normal values: many channels, small batches."""
    model, rounds, samples = nn.BatchNorm1d(4096, momentum=0.3), 4, 4
    random = torch.Generator().manual_seed(100 + rank)
    values_per_channel = measure_values_per_channel(model, torch.zeros(2, 4096))
    for _ in range(rounds):
        tracked_before = count_tracked_batches(model)
        for _ in range(STEPS):
            model(torch.randn(samples, 4096, generator=random))
        pool_statistics(model, samples, values_per_channel, tracked_before)
    return {"pooled": buffers(model)}


def recalibrated(count: int, rank: int, world_size: int) -> dict[str, Any]:
    """Recalibrate a model that was trained on other data."""
    model = net(0.1)
    values_per_channel = measure_values_per_channel(model, batch(2)[:2])
    with torch.no_grad():
        model(micro_batch(batch(5, around=-4), rank, world_size))
    batches = [batch(10 + index) for index in range(count)]
    parts = [micro_batch(x, rank, world_size) for x in batches]
    passes = [(len(x), partial(model.forward, x)) for x in parts]
    recalibrate(model, passes, values_per_channel)
    reference, worker = net(None), net(None)
    with torch.no_grad():
        for x in batches:
            reference(x)
            worker(micro_batch(x, rank, world_size))
    return {"own": buffers(worker), "pooled": buffers(model), "reference": buffers(reference)}


def other_layers(rank: int, world_size: int) -> dict[str, Any]:
    """Pool a model with buffers of other layers, which differ between the workers."""
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
    own_buffers = buffers(model)
    pool_statistics(model, 8, {"norm": 1.0, "sync": 1.0}, count_tracked_batches(model))
    return {"own": own_buffers, "pooled": buffers(model)}


def frozen(rank: int, world_size: int) -> dict[str, Any]:
    """Pool repeatedly a model with one layer in evaluation mode."""
    model = net(0.1)
    before = buffers(model)
    values_per_channel = measure_values_per_channel(model, batch(2)[:2])
    for _ in range(STEPS):
        tracked_before = count_tracked_batches(model)
        model.get_submodule("flat").eval()
        with torch.no_grad():
            model(micro_batch(batch(2), rank, world_size))
        pool_statistics(model, SAMPLES // world_size, values_per_channel, tracked_before)
    return {"before": before, "pooled": buffers(model)}


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    with gloo_group(rank, world_size, folder):
        results = {
            "one_forward": one_forward(rank, world_size),
            "stacked_layers": stacked_layers(rank, world_size),
            "pooled_again": pooled_again(rank, world_size),
            "random_micro_batches": random_micro_batches(rank, world_size),
            "recalibrated": {count: recalibrated(count, rank, world_size) for count in (1, 3)},
            "other_layers": other_layers(rank, world_size),
            "frozen": frozen(rank, world_size),
        }
    torch.save(results, folder / f"rank-{rank}.pt")
