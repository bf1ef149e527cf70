"""Batch normalisation on several workers: their running statistics made one, exactly.

In training each worker normalises by its own share of the batch and keeps running
statistics of its own, without a message (Akiba et al., Extremely Large Minibatch SGD, 2017).
Before an evaluation or a checkpoint the workers' statistics are put together, once (Honda et
al.), for each channel from the running means m_w and variances v_w of W workers:

    m = mean(m_w)
    B = mean((m_w - m)^2)                    spread between the workers
    v = ((1 - s) mean(v_w) + B) / (1 - s / W)

where s is the part of v by which one worker's mean strays from the true one by chance. A
running mean is a sum of batch means with weights c_j; of batches of n values per channel
(samples x positions) each, s = sum(c_j^2) / n, over the batches seen since the workers last
agreed. What they agreed on does not stray.

One batch per worker that counts in full (momentum 1, or the first one with momentum None):
s = 1 / n, and v is the law of total variance (within + between workers) with every n - 1 of
torch's unbiased variances made right, (W (n - 1) mean(v_w) + W n B) / (W n - 1): just the
statistics of all workers' values together. This is tested to rounding. Each layer's values
are those the worker had: behind another BatchNorm layer, they were normalised by its share.

For moving averages this cannot be had from m_w and v_w: the spread between the workers'
means at each step is averaged away before it is seen. Here B is the spread of the averages,
and it adds to v only as far as it exceeds, or falls short of, what chance alone brings: v is
unbiased when the shares are drawn at random. (1 - 1/n in place of 1 - s would lose up to 1/n
of the variance, again at each pooling: 3 % for a BatchNorm1d on 32 samples.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from raytrain_opt.config.optimizer import BatchNormSection
from raytrain_opt.errors import JobError, Problem


def prepare(model: nn.Module, section: BatchNormSection, *, world_size: int) -> nn.Module:
    """Set up the BatchNorm layers of a model that is on its device; the parameters stay the
    same objects, as do the names in `state_dict`.

    To be done before the optimiser, `compile` and DDP see the model. Returns the model, or
    another one if it was itself a BatchNorm layer. Raises JobError: SyncBatchNorm on CPU,
    where torch has none.
    """
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if section.momentum is not None:
        for layer in layers:
            layer.momentum = section.momentum
    if not (section.sync and layers) or world_size == 1:
        return model
    if next(model.parameters()).device.type == "cpu":
        raise JobError([_NO_SYNC_ON_CPU])
    synced: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return synced


_NO_SYNC_ON_CPU = Problem(
    "batch_norm.sync",
    "torch's SyncBatchNorm needs GPUs, but these workers compute on CPU",
    "true",
    "leave it out: the running statistics are pooled before every evaluation anyway",
)


@contextmanager
def count_positions(model: nn.Module) -> Iterator[dict[str, float]]:
    """Count values per channel and sample in each BatchNorm layer, in a forward pass inside.

    The dictionary, by the layers' names, is filled by a call of the model (not compiled yet)
    whose first argument is a batch; of a layer used twice the last use counts. Afterwards no
    hook is left. Any mode and batch size will do.
    """
    positions: dict[str, float] = {}
    samples = 1

    def count_samples(_module: nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal samples
        samples = len(args[0])

    def count_values(name: str, output: Tensor) -> None:
        positions[name] = output.numel() / output.shape[1] / samples

    hooks = [model.register_forward_pre_hook(count_samples)]
    for name, layer in _layers(model).items():
        hooks.append(
            layer.register_forward_hook(
                lambda _layer, _args, output, name=name: count_values(name, output)
            )
        )
    try:
        yield positions
    finally:
        for hook in hooks:
            hook.remove()


def batches_seen(model: nn.Module) -> dict[str, int]:
    """The layers' own counts of training batches, by their names. Waits for the device."""
    layers = _layers(model)
    counts = [layer.get_buffer("num_batches_tracked") for layer in layers.values()]
    return dict(zip(layers, torch.stack(counts).tolist() if counts else [], strict=True))


def pool_statistics(
    model: nn.Module, batch_size: int, positions: Mapping[str, float], since: Mapping[str, int]
) -> None:
    """Give all workers of the process group the running statistics of all, in one message.

    batch_size: samples of one worker in one forward pass. positions: see `count_positions`; a
    layer missing in it counts as one with endless values. since: `batches_seen` when the
    workers last agreed, before the training whose statistics are pooled.

    Other floating-point buffers become their mean. SyncBatchNorm layers, the same everywhere
    already, keep every bit. Does nothing without a process group, or with one of one process.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    layers = {
        name: layer
        for name, layer in _layers(model).items()
        if not isinstance(layer, nn.SyncBatchNorm)
    }
    others = _other_buffers(model)
    if not layers and not others:
        return
    by_chance = strayed_by_chance(model, batch_size, positions, since)
    _pool(list(layers.values()), [by_chance[name] for name in layers], others)


def strayed_by_chance(
    model: nn.Module, batch_size: int, positions: Mapping[str, float], since: Mapping[str, int]
) -> dict[str, float]:
    """s of each BatchNorm layer, by its name; the arguments are those of `pool_statistics`."""
    seen = batches_seen(model)
    return {
        name: _sum_of_squares(layer.momentum, seen[name], since[name])
        / (batch_size * positions[name])
        if name in positions
        else 0.0
        for name, layer in _layers(model).items()
    }


def recalibrate(
    model: nn.Module, batches: Iterable[Tensor], positions: Mapping[str, float]
) -> None:
    """Take the running statistics anew, as plain means over these training batches, and pool.

    batches: inputs on the model's device; every worker as many, of about one size. BatchNorm
    and all other layers are in training mode, dropout included (it draws random numbers): the
    activations are those of the training. Autocast is the caller's. Weights stay as they are;
    the modes and momenta are as before afterwards. Layers that stay in evaluation mode
    under `model.train()` are frozen and keep their statistics. Raises ValueError without a
    batch.

    As torch's `update_bn`, which resets frozen layers too and gives all one mode at the end.
    """
    samples = count = 0
    with _cumulative(model), torch.no_grad():
        since = batches_seen(model)
        for batch in batches:
            # Not the call, which is compiled if the model is: with momentum None it would be
            # compiled anew, and cut at every layer's counter.
            model.forward(batch)
            samples, count = samples + len(batch), count + 1
        if not count:
            raise ValueError("recalibrate needs at least one batch")
        pool_statistics(model, samples // count, positions, since)


@contextmanager
def _cumulative(model: nn.Module) -> Iterator[None]:
    """In training mode, with fresh statistics and cumulative averages."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    layers = [layer for layer in _layers(model).values() if layer.training]
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None
    try:
        yield
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        for module, training in modes:
            module.training = training


def _layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorm layers that keep running statistics, SyncBatchNorm included, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }


def _other_buffers(model: nn.Module) -> list[Tensor]:
    """Floating-point buffers that are not of a BatchNorm layer."""
    statistics = {
        id(buffer) for layer in _layers(model).values() for buffer in layer.buffers(recurse=False)
    }
    return [b for b in model.buffers() if b.is_floating_point() and id(b) not in statistics]


def _sum_of_squares(momentum: float | None, seen: int, before: int) -> float:
    """Of the weights that a running mean gives to its latest `seen - before` batches."""
    new = seen - before
    if momentum is None:
        return new / seen**2 if seen else 0.0
    return momentum * (1 - (1 - momentum) ** (2 * new)) / (2 - momentum)


def _pool(layers: list[_BatchNorm], by_chance: list[float], others: list[Tensor]) -> None:
    """The module's formula for all layers at once.

    In float64: the square of a float32 is exact there, so that B, a difference of squares,
    is as exact as the float32 means are.
    """
    means = [layer.get_buffer("running_mean") for layer in layers]
    variances = [layer.get_buffer("running_var") for layer in layers]
    device = (means or others)[0].device
    mean, var, rest = (_flat(tensors, device) for tensors in (means, variances, others))
    s = torch.tensor(by_chance, dtype=torch.float64, device=device)
    parts = [mean, mean.square(), var, s, rest]
    message = torch.cat(parts)
    dist.all_reduce(message)
    world_size = dist.get_world_size()
    message /= world_size
    mean, squares, var, s, rest = torch.split(message, [part.numel() for part in parts])
    channels = torch.tensor([m.numel() for m in means], dtype=torch.int64, device=device)
    s = s.repeat_interleave(channels)
    between = (squares - mean.square()).clamp(min=0)
    _fill(means, mean)
    _fill(variances, ((1 - s) * var + between) / (1 - s / world_size))
    _fill(others, rest)


def _flat(tensors: list[Tensor], device: torch.device) -> Tensor:
    if not tensors:
        return torch.empty(0, dtype=torch.float64, device=device)
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])


def _fill(tensors: list[Tensor], values: Tensor) -> None:
    parts = torch.split(values, [tensor.numel() for tensor in tensors])
    with torch.no_grad():
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
