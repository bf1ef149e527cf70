"""DDP and threads of one process."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def distribute(model: nn.Module) -> nn.Module:
    """Wrap for data parallelism; BatchNorm statistics stay per process while training."""
    device = next(model.parameters()).device
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
    )


def use_threads(count: int) -> None:
    """Compute threads of this process on CPU."""
    torch.set_num_threads(max(1, count))
