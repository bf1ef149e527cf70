"""Make the buffers of all workers equal: the running statistics of BatchNorm are averaged.

During training every worker keeps statistics of its own share (no synchronisation per
step); for evaluation and for the state that goes on they are averaged (Honda et al.).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


def average_buffers(model: nn.Module) -> None:
    """Replace each floating-point buffer by its mean over the process group, in one message."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if not buffers or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    flat = torch.cat([buffer.detach().reshape(-1).float() for buffer in buffers])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = torch.split(flat, [buffer.numel() for buffer in buffers])
    with torch.no_grad():
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))
