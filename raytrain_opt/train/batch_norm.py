"""Batch normalization on several workers: running averages that are the same on all of them.

In training mode, each micro-batch is normalized by its own statistics (Akiba et al., Extremely
Large Minibatch SGD, 2017). All micro-batches of a step begin with the buffers b of the step's
start; the one of number i leaves b_i, and the step ends with their mean, added along the tree of
`train.tree_sum`. So the running averages move once per step, by the mean over its micro-batches:

    b <- (1 - momentum) b + momentum mean_i(s_i)        s_i: torch's statistics of micro-batch i

The same holds for all floating-point buffers that a forward pass changes and `state_dict` has;
integers become those of micro-batch 0. With one micro-batch per step, this is torch's rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import compress
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from raytrain_opt.results import BufferUpdates
from raytrain_opt.train.tree_sum import TreeSum


def set_momentum(model: nn.Module, momentum: float | None) -> None:
    """Set the weight of a new batch in the running averages; None: leave the model's."""
    for layer in model.modules():
        if momentum is not None and isinstance(layer, _BatchNorm):
            layer.momentum = momentum


def freeze_statistics(model: nn.Module, patterns: Sequence[str]) -> None:
    """Keep BatchNorm layers in eval mode whose weights match a pattern, also in training."""
    for name, layer in layers_with_statistics(model).items():
        if any(fnmatchcase(f"{name}.weight", pattern) for pattern in patterns):
            layer.train = MethodType(_stay_in_eval_mode, layer)  # type: ignore[method-assign]
            layer.eval()


def _stay_in_eval_mode(layer: nn.Module, mode: bool = True) -> nn.Module:
    layer.training = False
    return layer


class StepBuffers:
    """The buffers of a model within a step; which change is found in a phase's first step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.begin_phase(range(1), 1)

    def begin_phase(self, share: range, count: int) -> None:
        """Begin a phase, in training mode, with `share` of `count` micro-batches here."""
        self._share, self._count = share, count
        self._places: list[tuple[nn.Module, str]] = []
        if count > 1:
            saved = self._model.state_dict().keys()
            self._places = [
                (module, name)
                for path, module in self._model.named_modules()
                for name, buffer in module.named_buffers(recurse=False)
                if f"{path}.{name}".lstrip(".") in saved
                and not buffer.is_complex()
                and (module.training or not isinstance(module, _BatchNorm))
            ]
        self._are_known = False  # which of them change

    def begin(self, number: int) -> None:
        """Begin a micro-batch; the first one of this process begins the step."""
        if self._places and number == self._share[0]:
            self._before = [buffer.clone() for buffer in self._buffers]
            self._sums = TreeSum(self._share, self._count)

    @property
    def _buffers(self) -> list[Tensor]:
        return [module.get_buffer(name) for module, name in self._places]

    def take(self, number: int) -> None:
        """Take what a micro-batch has left, and let the next one begin as this one did."""
        if not self._places:
            return
        values = _pack(self._buffers, is_first=number == 0)
        if not self._are_known:
            changed = values != _pack(self._before, is_first=number == 0)
            values = torch.cat([values, changed.double()])
        self._sums.add(number, {"buffers": values})
        if number != self._share[-1]:
            self._write(self._before)

    def end_step(self, reduce: Callable[[Sequence[Tensor]], None]) -> None:
        """Give the model the mean over all micro-batches; `reduce`: of `TreeExchange`."""
        if not self._places:
            return
        nodes = [node["buffers"] for node in self._sums.nodes]
        reduce(nodes)
        total = nodes[-1]
        if not self._are_known:
            total, changes = total.chunk(2)
        means = [*_unpack(total, self._before, self._count)]
        if not self._are_known:
            sizes = [_packed_size(buffer) for buffer in self._before]
            parts = zip(self._places, torch.split(changes, sizes), strict=True)
            changing = [
                isinstance(module, _BatchNorm) or bool(part.any())  # waits for the device
                for (module, _), part in parts
            ]
            self._write(self._before)
            self._places = [*compress(self._places, changing)]
            means = [*compress(means, changing)]
            self._are_known = True
        self._write(means)

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor]) -> None:
        if self._places:
            torch._foreach_copy_(self._buffers, list(values))


def _packed_size(buffer: Tensor) -> int:
    return buffer.numel() * (1 if buffer.is_floating_point() else 2)


def _pack(buffers: Sequence[Tensor], *, is_first: bool) -> Tensor:
    """Return one tensor, float64; integers as pairs of int32, as 0 unless `is_first`."""
    parts = []
    for buffer in buffers:
        part = buffer.reshape(-1)
        if not buffer.is_floating_point():
            part = part.long().contiguous().view(torch.int32) * is_first
        parts.append(part.double())
    return torch.cat(parts)


def _unpack(total: Tensor, like: Sequence[Tensor], count: int) -> Iterator[Tensor]:
    for buffer, part in zip(like, torch.split(total, [*map(_packed_size, like)]), strict=True):
        if buffer.is_floating_point():
            value = part / count
        else:
            value = part.to(torch.int32).view(torch.int64)
        yield value.view(buffer.shape).to(buffer.dtype)


def collect_buffers(model: nn.Module, batches: int) -> BufferUpdates:
    """Copy the floating-point buffers after `batches` forward passes."""
    values = {
        name: buffer.detach().double().cpu().numpy().copy()
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point()
    }
    layers = layers_with_statistics(model).items()
    trained = frozenset(name for name, layer in layers if layer.training)
    return BufferUpdates(batches, values, trained)


def recalibrate(model: nn.Module, steps: Iterable[Callable[[], object]]) -> None:
    """Recompute the running averages as plain means over training steps.

    Unlike torch's `update_bn`, keeps the statistics of layers that stay in evaluation mode under
    `model.train()`. `steps`: the forward passes of each step, which end with
    `StepBuffers.end_step`. Autocast is up to the caller.
    """
    modes = [(module, module.training) for module in model.modules()]
    momenta: list[tuple[_BatchNorm, float | None]] = []
    try:
        model.train()
        layers = [layer for layer in layers_with_statistics(model).values() if layer.training]
        momenta += [(layer, layer.momentum) for layer in layers]
        for layer in layers:
            layer.reset_running_stats()
        for number, forward in enumerate(steps, 1):
            for layer in layers:
                # With the momentum None, torch reads the number of batches from the device.
                layer.momentum = 1 / number
            with torch.enable_grad():  # a loss may use torch.autograd.grad
                forward()
    finally:
        for layer, momentum in momenta:
            layer.momentum = momentum
        for module, training in modes:
            module.training = training


def layers_with_statistics(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers that track statistics, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }
