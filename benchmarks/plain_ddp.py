"""The baseline of train_throughput.py: a plain torchrun DDP script without this package's loop.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.plain_ddp \
        --x train_x.npy --y train_y.npy --classes 10

Only the network comes from raytrain_opt, so that both sides train the same one. The rest is what
one writes by hand for a data set in memory: a permutation per epoch, batches gathered from uint8
arrays (on the GPU if there is one), normalized and laid out as channels_last, DDP with gradients
as bucket views, foreach SGD (with --fused the fused one), and loss and hits summed on the device.

Rank 0 prints one JSON object: `samples` per epoch, `loss_sum` and `hits` of its last epoch, and
for each epoch `loop_s`, the seconds of the loop of steps (until the sums arrive on the CPU), and
`epoch_s`, those of the epoch including the reduction of the sums.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from raytrain_opt.config.schema import ModelSection
from raytrain_opt.models import build_model


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    data = InMemory.load(args.x, args.y, device)
    model = _model(args, data, device)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=args.lr,
        momentum=0.9,
        weight_decay=1e-4,
        **{"fused" if args.fused else "foreach": True},
    )
    loop_s, epoch_s = [], []
    for epoch in range(args.epochs):
        started_s = time.monotonic()
        sums = train_epoch(model, optimizer, data, epoch, args.global_batch_size)
        loss_sum, correct = sums.tolist()  # the epoch's only wait for the device
        loop_s.append(time.monotonic() - started_s)
        dist.all_reduce(sums)
        epoch_s.append(time.monotonic() - started_s)
    steps = len(data.y) // args.global_batch_size
    if dist.get_rank() == 0:
        totals = {"samples": steps * args.global_batch_size, "loss_sum": loss_sum, "hits": correct}
        print(json.dumps({**totals, "loop_s": loop_s, "epoch_s": epoch_s}))
    dist.destroy_process_group()


@dataclass(frozen=True)
class InMemory:
    """uint8 images [samples, height, width, channels] and labels on the training device."""

    x: Tensor
    y: Tensor
    scale: Tensor
    shift: Tensor

    @classmethod
    def load(cls, x_path: str, y_path: str, device: torch.device) -> InMemory:
        """Load the arrays and compute mean and deviation per channel.

        Both are repeated for every pixel, so that one multiplication and one addition normalize a
        batch.
        """
        x, y = np.load(x_path), np.load(y_path)
        mean, deviation = x.mean((0, 1, 2)), x.std((0, 1, 2))
        pixels = x.shape[1] * x.shape[2]
        scale, shift = (
            torch.from_numpy(np.tile(values, pixels)).float().to(device)
            for values in (1 / deviation, -mean / deviation)
        )
        return cls(torch.from_numpy(x).to(device), torch.from_numpy(y).to(device), scale, shift)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalized float32 [N, C, H, W], channels_last like the data, and labels."""
        images = self.x.index_select(0, indices)
        values = images.view(len(images), -1).float().mul_(self.scale).add_(self.shift)
        return values.view(images.shape).permute(0, 3, 1, 2), self.y.index_select(0, indices)


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: InMemory,
    epoch: int,
    global_batch_size: int,
) -> Tensor:
    """Train full batches only; return this rank's [sum of losses, hits] on the device."""
    rank, size = dist.get_rank(), global_batch_size // dist.get_world_size()
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(epoch))
    order = order.to(data.y.device)
    sums = torch.zeros(2, dtype=torch.float64, device=data.y.device)
    model.train()
    for start in range(0, len(order) - global_batch_size + 1, global_batch_size):
        first = start + rank * size
        x, y = data.batch(order[first : first + size])
        optimizer.zero_grad(set_to_none=True)
        output = model(x)
        loss = cross_entropy(output, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            sums += torch.stack((loss.detach() * len(y), (output.argmax(1) == y).sum()))
    return sums


def _model(args: argparse.Namespace, data: InMemory, device: torch.device) -> nn.Module:
    _, height, width, channels = data.x.shape
    model = build_model(
        ModelSection(name=args.model, args=json.loads(args.model_args)),
        num_classes=args.classes,
        sample_shape=(channels, height, width),
        seed=0,
    ).to(device)
    model = model.to(memory_format=torch.channels_last)
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A plain DDP training, timed.")
    parser.add_argument("--x", required=True, help=".npy of uint8 images [N, H, W, C]")
    parser.add_argument("--y", required=True, help=".npy of labels [N]")
    parser.add_argument("--classes", type=int, required=True)
    parser.add_argument("--model", default="resnet8")
    parser.add_argument("--model-args", default="{}", help="JSON")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--global-batch-size", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--fused", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
