"""DDP and threads of one process."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# torch 2.15 gave `broadcast_buffers` a new name and warns about the old one.
_SYNC_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers": False
}


def distribute(model: nn.Module) -> nn.Module:
    """Wrap for data parallelism; BatchNorm statistics stay per process while training."""
    device = next(model.parameters()).device
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **_SYNC_BUFFERS,
    )


def use_threads(count: int) -> None:
    """Compute threads of this process on CPU."""
    torch.set_num_threads(max(1, count))
