"""The model of a training process: built, on its device, with its BatchNorm layers prepared."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from raytrain_opt.data.base import DataInfo
from raytrain_opt.models import build_model
from raytrain_opt.train import batch_norm
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.task import Task, try_task


def set_up_model(
    config: LearnerConfig, info: DataInfo, task: Task, device: torch.device
) -> tuple[nn.Module, dict[str, float], tuple[str, ...]]:
    """Build the model; return `count_values_per_channel`, and the names of the task's metrics."""
    model = build_model(
        config.model,
        num_classes=info.num_classes,
        sample_shape=info.sample_shape,
        seed=config.seed,
    ).to(device)
    if config.channels_last and len(info.sample_shape) == 3:
        model = model.to(memory_format=torch.channels_last)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    model = batch_norm.prepare_batch_norm(model, config.batch_norm, world_size=world_size)
    batch_norm.freeze_statistics(model, config.model.freeze)
    with batch_norm.count_values_per_channel(model) as values_per_channel:
        metrics = try_task(task, model, info, device)
    return model, values_per_channel, metrics
