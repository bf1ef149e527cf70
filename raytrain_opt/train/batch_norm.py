"""Batch normalization on several workers: combine their running statistics exactly.

While training, each worker normalizes with the statistics of its own micro-batch and keeps
its own running statistics, without communication (Akiba et al., Extremely Large Minibatch
SGD, 2017). Before an evaluation or a checkpoint, the statistics are combined once (Honda et
al.). For each channel, from the running means m_w and variances v_w of workers that computed the
fractions p_w of all micro-batches:

    m = sum(p_w m_w)
    B = sum(p_w (m_w - m)^2)                 spread between the workers
    v = (sum(p_w (1 - s_w) v_w) + B) / (1 - sum(p_w^2 s_w))

Here s_w is the sampling noise: the variance of one worker's running mean about the true mean,
as a fraction of v. A running mean is a sum of batch means with weights c_j; for batches of n
values per channel (samples x values per channel and sample), s = sum(c_j^2) / n, over the
batches since the workers last had equal statistics. Equal statistics carry no noise.

With W equal workers, v = ((1 - s) mean(v_w) + B) / (1 - s / W). One batch per worker that counts
in full (momentum 1, or the first one with momentum None): s = 1 / n, and v is the law of total
variance (within + between workers), corrected for the n - 1 of torch's unbiased variances, (W (n -
1) mean(v_w) + W n B) / (W n - 1): exactly the statistics of all workers' values together. This is
tested to rounding. Each layer's values are those that the worker computed: behind another
BatchNorm layer, they were normalized with the worker's micro-batch.

Moving averages do not allow that: the spread between the workers' means at each step is
averaged away before it can be measured. Here B is the spread of the averages, and it changes
v only by its difference from the spread expected by chance: v is unbiased when the
micro-batches are drawn at random. (1 - 1/n in place of 1 - s would lose up to 1/n of the
variance, again at each combination: 3 % for a BatchNorm1d on 32 samples.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from itertools import count
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from raytrain_opt.config.updates import BatchNormSection
from raytrain_opt.data.nesting import leaves
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.random_state import preserve_modes
from raytrain_opt.results import BufferUpdates


def prepare_batch_norm(
    model: nn.Module, section: BatchNormSection, *, world_size: int
) -> nn.Module:
    """Apply the job's settings to the BatchNorm layers of a model that is on its device.

    Call it before the optimizer, `compile` and DDP see the model. Parameters stay the same
    objects, and the names in `state_dict` stay the same. Returns the model, or a new module if
    the model itself is a BatchNorm layer. Raises JobError for SyncBatchNorm on CPU, where
    torch has none.
    """
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if section.momentum is not None:
        for layer in layers:
            layer.momentum = section.momentum
    if not (section.sync and layers) or world_size == 1:
        return model
    if next(model.parameters()).device.type == "cpu":
        rule = "torch's SyncBatchNorm needs GPUs, but these workers compute on CPU"
        hint = "leave it out: the running statistics are combined before every evaluation anyway"
        raise JobError([Problem("batch_norm.sync", rule, "true", hint)])
    synced: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return synced


def freeze_statistics(model: nn.Module, patterns: Sequence[str]) -> None:
    """Keep BatchNorm layers in eval mode whose weights match a pattern, also in training."""
    for name, layer in _layers(model).items():
        if any(fnmatchcase(f"{name}.weight", pattern) for pattern in patterns):
            layer.train = MethodType(_stay_in_eval_mode, layer)  # type: ignore[method-assign]
            layer.eval()


def _stay_in_eval_mode(layer: nn.Module, mode: bool = True) -> nn.Module:
    layer.training = False
    return layer


@contextmanager
def count_values_per_channel(model: nn.Module) -> Iterator[dict[str, float]]:
    """Count values per channel and sample in each BatchNorm layer during a forward pass.

    The dictionary, by layer name, is filled by a call of the model (not compiled yet) whose
    first argument is a batch, in any mode and of any size. If a layer is used twice, the last
    use counts. All hooks are removed on exit.
    """
    values_per_channel: dict[str, float] = {}
    samples = 1

    def count_samples(_module: nn.Module, *inputs: Any) -> None:
        nonlocal samples
        samples = len(next(leaves(inputs)))

    def count_values(name: str, _layer: nn.Module, _args: Any, output: Tensor) -> None:
        values_per_channel[name] = output.numel() / output.shape[1] / samples

    hooks = [model.register_forward_pre_hook(count_samples, with_kwargs=True)]
    for name, layer in _layers(model).items():
        hooks.append(layer.register_forward_hook(partial(count_values, name)))
    try:
        yield values_per_channel
    finally:
        for hook in hooks:
            hook.remove()


def count_tracked_batches(model: nn.Module) -> dict[str, int]:
    """Read `num_batches_tracked` of each BatchNorm layer, by name. Waits for the device."""
    layers = _layers(model)
    counts = [layer.get_buffer("num_batches_tracked") for layer in layers.values()]
    return dict(zip(layers, torch.stack(counts).tolist() if counts else [], strict=True))


def pool_statistics(
    model: nn.Module,
    batch_size: int,
    values_per_channel: Mapping[str, float],
    since: Mapping[str, int],
) -> None:
    """Combine the running statistics of all workers of the process group, with one all-reduce.

    Other floating-point buffers become their mean; integers become rank 0's, as with DDP.
    SyncBatchNorm layers are equal on all workers and keep every bit. Does nothing without a
    process group of at least two.

    Args:
        model: the same on each worker, but for its buffers.
        batch_size: samples of one worker in one forward pass.
        values_per_channel: see `count_values_per_channel`; a missing layer has no sampling noise.
        since: `count_tracked_batches` when all workers last had equal statistics.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    layers = {
        name: layer
        for name, layer in _layers(model).items()
        if not isinstance(layer, nn.SyncBatchNorm)
    }
    others, integers = _other_buffers(model)
    for buffer in integers:
        message = buffer.contiguous().view(-1).view(torch.uint8)
        dist.broadcast(message, src=0)
        buffer.copy_(message.view(buffer.dtype).view_as(buffer))
    if not layers and not others:
        return
    noise = mean_sampling_noise(model, batch_size, values_per_channel, since)
    tracked = count_tracked_batches(model)
    # A frozen layer computes nothing, and all workers count alike.
    batches = [max(1, tracked[name] - since[name]) for name in layers]
    means = _pool(list(layers.values()), [noise[name] for name in layers], batches, others)
    for (name, layer), mean in zip(layers.items(), means, strict=True):
        if tracked[name] > since[name]:
            layer.get_buffer("num_batches_tracked").fill_(since[name] + mean)


def gather_buffers(model: nn.Module) -> list[dict[str, Tensor]]:
    """Return copies of the buffers of each worker, by rank; without a group of this process."""
    saved = model.state_dict().keys()  # other buffers, such as caches, may change their shape
    own = {n: b.to("cpu", copy=True) for n, b in model.named_buffers() if n in saved}
    if not dist.is_initialized():
        return [own]
    of_ranks = [own] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return of_ranks


def take_own_buffers(model: nn.Module, of_ranks: Sequence[Mapping[str, Tensor]]) -> bool:
    """Give a worker back what it had at `gather_buffers`; return whether the group is the same."""
    rank, world_size = (
        (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    )
    if world_size != len(of_ranks):
        return False
    for name, buffer in of_ranks[rank].items():
        model.get_buffer(name).copy_(buffer)
    return True


def mean_sampling_noise(
    model: nn.Module,
    batch_size: int,
    values_per_channel: Mapping[str, float],
    since: Mapping[str, int],
) -> dict[str, float]:
    """Return s of each BatchNorm layer, by name; for the arguments see `pool_statistics`."""
    tracked = count_tracked_batches(model)
    return {
        name: _sum_of_squares(layer.momentum, tracked[name], since[name])
        / (batch_size * values_per_channel[name])
        if name in values_per_channel
        else 0.0
        for name, layer in _layers(model).items()
    }


def collect_buffers(
    model: nn.Module,
    batch_size: int,
    values_per_channel: Mapping[str, float],
    since: Mapping[str, int],
    batches: int,
) -> BufferUpdates:
    """Copy the floating-point buffers after `batches` forward passes, with the sampling noise.

    For asynchronous training, whose workers compute different numbers of micro-batches
    (`async_training.buffer_pooling`). For the other arguments see `pool_statistics`.
    """
    tracked = count_tracked_batches(model)
    noise = mean_sampling_noise(model, batch_size, values_per_channel, since)
    values = {
        name: buffer.detach().double().cpu().numpy().copy()
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point()
    }
    trained = {name: s for name, s in noise.items() if tracked[name] > since[name]}
    return BufferUpdates(batches, values, trained)


def recalibrate(
    model: nn.Module,
    batches: Iterable[tuple[int, Callable[[], object]]],
    values_per_channel: Mapping[str, float],
) -> None:
    """Recompute the running statistics as plain means over training batches, and combine them.

    Like torch's `update_bn`, which also resets frozen layers and leaves all layers in one mode.
    All layers are in training mode, dropout included (it draws random numbers), so that the
    activations are those of the training. Layers that stay in evaluation mode under
    `model.train()` are frozen and keep their statistics. Weights do not change; modes and
    momenta are restored. Autocast is up to the caller.

    Args:
        model: the same on each worker.
        batches: number of samples and forward pass of each; as many on each worker, of similar
            size.
        values_per_channel: see `count_values_per_channel`.

    Raises:
        ValueError: there is no batch.
    """
    samples = count = 0
    with preserve_modes(model), _cumulative_averages(model), torch.no_grad():
        since = count_tracked_batches(model)
        for size, forward in batches:
            with torch.enable_grad():  # a loss may use torch.autograd.grad
                forward()
            samples, count = samples + size, count + 1
        if not count:
            raise ValueError("recalibrate needs at least one batch")
        pool_statistics(model, samples // count, values_per_channel, since)


@contextmanager
def _cumulative_averages(model: nn.Module) -> Iterator[None]:
    """Reset the statistics and use cumulative averages, in training mode."""
    model.train()
    layers = [layer for layer in _layers(model).values() if layer.training]
    momenta = [layer.momentum for layer in layers]
    hooks = []
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None
        # With the momentum None, torch reads the number of batches from the device, and waits.
        passes = count(1)
        hooks += [
            layer.register_forward_pre_hook(partial(_set_cumulative_momentum, passes)),
            layer.register_forward_hook(_unset_momentum),
        ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


def _set_cumulative_momentum(passes: Iterator[int], layer: _BatchNorm, *_: object) -> None:
    layer.momentum = 1 / next(passes)


def _unset_momentum(layer: _BatchNorm, *_: object) -> None:
    layer.momentum = None


def _layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers that track statistics, SyncBatchNorm included, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }


def _other_buffers(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return the buffers that belong to no BatchNorm layer: floats, and others that are saved."""
    statistics = {
        id(buffer) for layer in _layers(model).values() for buffer in layer.buffers(recurse=False)
    }
    saved = model.state_dict().keys()
    buffers = [(n, b) for n, b in model.named_buffers() if id(b) not in statistics]
    floats = [buffer for _, buffer in buffers if buffer.is_floating_point()]
    return floats, [b for n, b in buffers if n in saved and not b.is_floating_point()]


def _sum_of_squares(momentum: float | None, tracked: int, before: int) -> float:
    """Sum the squared weights of the latest `tracked - before` batches in a running mean."""
    new = tracked - before
    if momentum is None:
        return new / tracked**2 if tracked else 0.0
    return momentum * (1 - (1 - momentum) ** (2 * new)) / (2 - momentum)


def _pool(
    layers: list[_BatchNorm], noise: list[float], batches: list[int], others: list[Tensor]
) -> list[int]:
    """Apply the module's formula to all layers at once; return the workers' mean batches.

    In float64: the square of a float32 is exact there, so that B, a difference of squares,
    is as exact as the float32 means are.
    """
    means = [layer.get_buffer("running_mean") for layer in layers]
    variances = [layer.get_buffer("running_var") for layer in layers]
    device = (means or others)[0].device
    mean, var, other = (_flatten(tensors, device) for tensors in (means, variances, others))
    channels = torch.tensor([m.numel() for m in means], dtype=torch.int64, device=device)
    s, n = torch.tensor([noise, batches], dtype=torch.float64, device=device)
    n_of_channel = n.repeat_interleave(channels)
    within = (1 - s).repeat_interleave(channels) * var
    parts = [n_of_channel * v for v in (mean, mean.square(), within)] + [n * n * s, n, other]
    message = torch.cat(parts)
    dist.all_reduce(message)
    mean, squares, within, bias, n, other = torch.split(message, [len(part) for part in parts])
    total = n.repeat_interleave(channels)
    bias = (bias / (n * n)).repeat_interleave(channels)
    mean = mean / total
    between = (squares / total - mean.square()).clamp(min=0)
    _fill(means, mean)
    _fill(variances, (within / total + between) / (1 - bias))
    _fill(others, other / dist.get_world_size())
    return [round(batches / dist.get_world_size()) for batches in n.tolist()]


def _flatten(tensors: list[Tensor], device: torch.device) -> Tensor:
    nothing = torch.empty(0, dtype=torch.float64, device=device)
    return torch.cat([nothing, *(tensor.detach().reshape(-1).double() for tensor in tensors)])


def _fill(tensors: list[Tensor], values: Tensor) -> None:
    pieces = torch.split(values, [tensor.numel() for tensor in tensors])
    with torch.no_grad():
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))
