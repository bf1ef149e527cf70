"""Layer-wise adaptive rate scaling (LARS): You, Gitman and Ginsburg 2017 (arXiv 1708.03888).

    w, g     weights and gradient of a layer       |x|    Euclidean norm
    eta      trust coefficient                     d      weight decay
    m        momentum                              v      momentum buffer, initially 0

    r = eta |w| / (|g| + d |w| + eps)              trust ratio of the layer            (1)
    r = min(r / lr, 1)                             instead, with LARC's clipping       (2)
    r = 1                                          if |w| = 0 or |g| = 0               (3)
    v = m v + r (g + d w)                                                              (4)
    w = w - lr v                                                                       (5)

The ratio multiplies the gradient before the momentum, and the rate multiplies their sum, so
that a schedule changes all of v at once; You et al. put the rate into (4), which is the same
while the rate is constant. (4) and (5) are torch's SGD on the adapted gradients r (g + d w),
and torch computes them. `eps` is an addition, as in timm: it bounds r for a layer whose gradient
nearly vanishes. (2) is NVIDIA apex's LARC: the layer's rate is at most `lr`.

Norms are float32 (float64 for float64). Numbers that are not finite are not hidden: a layer
whose gradient holds a NaN becomes NaN, by (1). An infinite |g|, also one that overflows float32
(from about 1e19), gives r = 0: the layer's finite elements do not change and infinite ones
become NaN. Other layers are not affected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd

# Elements in a row of the scratch memory: each layer wastes less than one row.
_ROW = 1024
# Elements of the layers whose ratios a CPU computes together: 256 KiB in float32, which the
# caches hold until the update reads them again.
_BLOCK = 2**16

# Parameters, their gradients and their momentum buffers (None before the first step; an empty
# list without momentum).
Batch = tuple[list[Tensor], list[Tensor], list[Tensor | None]]


class LARS(Optimizer):
    """SGD with momentum in which each layer moves in proportion to the norm of its weights.

    A group with `"adapt": False` is updated by torch's SGD with the group's settings: that is
    how biases and normalization are excluded, see `parameter_groups`. All layers of a group are
    updated by few kernels and no step waits for the device; `lr` may be a tensor, which captured
    CUDA graphs read at every replay. On CUDA the optimizer keeps memory for the adapted
    gradients, as large as the weights.

    Raises ValueError: a value out of its range. RuntimeError: sparse gradients or complex
    parameters.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        *,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
        clip: bool = False,
    ) -> None:
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"LARS: lr as a tensor must have one element, not {lr.numel()}")
        settings = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
        }
        for name, value in settings.items():
            _check(name, float(value))
        if nesterov and (momentum == 0 or dampening != 0):
            raise ValueError("LARS: nesterov needs a momentum above 0 and dampening 0")
        super().__init__(params, {**settings, "nesterov": nesterov, "clip": clip, "adapt": True})
        self._scratch: dict[tuple[int, torch.device, torch.dtype], _Scratch] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state, with each buffer in the memory layout of its parameter.

        `load_state_dict` calls it too.
        """
        super().__setstate__(state)
        self.__dict__.setdefault("_scratch", {})
        for param, values in self.state.items():
            buffer = values.get("momentum_buffer")
            if buffer is not None and buffer.stride() != param.stride():
                values["momentum_buffer"] = torch.empty_like(param).copy_(buffer)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return the loss of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            for params, grads, buffers in self._batches(group):
                if not group["adapt"]:
                    _descend(params, grads, buffers, group, group["weight_decay"])
                elif _uses_scratch(params[0].device):
                    adapted = self._scratch_for(index, params).adapted(grads, group)
                    _descend(params, adapted, buffers, group)
                elif _reads_ratios(params[0].device):
                    _update_layer_by_layer(params, grads, buffers, group)
                else:
                    _descend(params, _adapted(params, grads, group), buffers, group)
                self._save_buffers(params, buffers)
        return loss

    def _batches(self, group: dict[str, Any]) -> Iterator[Batch]:
        """Yield the group's parameters with a gradient, by device and type."""
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        grads = [p.grad for p in params]
        if any(grad.is_sparse or grad.is_complex() for grad in grads):
            raise RuntimeError("LARS needs dense real gradients")
        buffers: list[Tensor | None] = []
        if group["momentum"] != 0:
            buffers = [self.state[p].get("momentum_buffer") for p in params]
        columns = cast(list[list[Tensor | None]], [params, grads, buffers])
        for batch, _ in Optimizer._group_tensors_by_device_and_dtype(columns).values():
            yield cast(Batch, tuple(batch))

    def _scratch_for(self, index: int, params: list[Tensor]) -> _Scratch:
        """Return the scratch memory of the group's last step if it fits these parameters."""
        key = (index, params[0].device, params[0].dtype)
        scratch = self._scratch.get(key)
        if scratch is None or not scratch.matches(params):
            scratch = self._scratch[key] = _Scratch(params)
        return scratch

    def _save_buffers(self, params: list[Tensor], buffers: list[Tensor | None]) -> None:
        for param, buffer in zip(params, buffers, strict=False):
            self.state[param]["momentum_buffer"] = buffer


def _uses_scratch(device: torch.device) -> bool:
    """Return True for eager CUDA; the compiler would fuse the formula into few kernels anyway."""
    return device.type == "cuda" and not torch.compiler.is_compiling()


def _reads_ratios(device: torch.device) -> bool:
    """Return True where ratios can be read as Python numbers without waiting for a device."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


class _Scratch:
    """Memory for the adapted gradients of several layers, scaled by their ratios in one kernel.

    A matrix in which each row belongs to one layer; the rest of a layer's last row is 0.
    (torch's `_foreach_mul_` with one device scalar per tensor launches a kernel per tensor.)
    """

    def __init__(self, params: list[Tensor]) -> None:
        rows = [-(-param.numel() // _ROW) for param in params]
        self._params = params
        self._strides = [param.stride() for param in params]
        self._memory = params[0].new_zeros(sum(rows), _ROW)
        self._owner = torch.empty(sum(rows), dtype=torch.int64, device=params[0].device)
        self._norms = params[0].new_empty(2 * len(params), dtype=_norm_dtype(params[0]))
        self._norm_slots = list(self._norms.unbind())
        self._grads = []
        start = 0
        for layer, (param, count) in enumerate(zip(params, rows, strict=True)):
            self._owner[start : start + count] = layer
            strides = torch.empty_like(param, device="meta").stride()
            self._grads.append(self._memory.as_strided(param.shape, strides, start * _ROW))
            start += count

    def matches(self, params: list[Tensor]) -> bool:
        """Return whether these are the parameters it was made for, in the same memory layout."""
        return len(params) == len(self._params) and all(
            param is own and param.stride() == stride
            for param, own, stride in zip(params, self._params, self._strides, strict=True)
        )

    def adapted(self, grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Return r (g + d w) of every layer, valid until the next call."""
        norms = torch._foreach_norm(self._params + grads, 2, self._norms.dtype)
        torch._foreach_copy_(self._norm_slots, norms)
        torch._foreach_copy_(self._grads, grads)
        if group["weight_decay"] != 0:
            torch._foreach_add_(self._grads, self._params, alpha=group["weight_decay"])
        ratios = _trust_ratios(self._norms, group)
        self._memory.mul_(ratios.index_select(0, self._owner).unsqueeze(1))
        return self._grads


def _update_layer_by_layer(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor | None],
    group: dict[str, Any],
) -> None:
    """Update on a CPU, layer by layer while a layer is in the caches: r g with decay r d.

    New momentum buffers are put into `buffers`.
    """
    for block in _blocks(params):
        norms = _norms(params[block], grads[block])
        for layer, r in enumerate(_trust_ratios(norms, group).tolist(), block.start):
            one = slice(layer, layer + 1)
            buffer = buffers[one]
            _descend(params[one], [grads[layer] * r], buffer, group, r * group["weight_decay"])
            buffers[one] = buffer


def _blocks(params: list[Tensor]) -> Iterator[slice]:
    """Yield the layers whose ratios are computed together: few calls, and data still in caches."""
    start, size = 0, 0
    for index, param in enumerate(params):
        if size and size + param.numel() > _BLOCK:
            yield slice(start, index)
            start, size = index, 0
        size += param.numel()
    yield slice(start, len(params))


def _adapted(params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """Return r (g + d w) of every layer, in operations that the compiler can fuse."""
    ratios = list(_trust_ratios(_norms(params, grads), group).unbind())
    decayed = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
    torch._foreach_mul_(decayed, ratios)
    return decayed


def _norms(params: list[Tensor], grads: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(params + grads, 2, _norm_dtype(params[0])))


def _trust_ratios(norms: Tensor, group: dict[str, Any]) -> Tensor:
    """Compute (1) to (3) for n layers. norms [2 n]: of their weights, then of their gradients."""
    weights, gradients = norms.chunk(2)
    denominators = torch.add(gradients, weights, alpha=group["weight_decay"]) + group["eps"]
    ratios = weights / denominators * group["trust_coefficient"]
    if group["clip"]:
        ratios = (ratios / group["lr"]).clamp(max=1.0)
    adapted: Tensor = ratios.masked_fill(torch.minimum(weights, gradients) == 0, 1.0)
    return adapted


def _norm_dtype(param: Tensor) -> torch.dtype:
    return torch.promote_types(param.dtype, torch.float32)


def _descend(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor | None],
    group: dict[str, Any],
    weight_decay: float = 0.0,
) -> None:
    """Compute (4) and (5) with `grads` as r g and `weight_decay` as r d.

    New momentum buffers are put into `buffers`.
    """
    fused = _can_be_fused(params, grads, buffers, group["lr"])
    sgd(
        params,
        grads,
        buffers,
        foreach=not fused,
        fused=fused,
        weight_decay=weight_decay,
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=False,
    )


def _can_be_fused(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor | None],
    lr: float | Tensor,
) -> bool:
    """Return whether torch's fused kernel can be used.

    It needs the same memory layout for a parameter, its gradient and its buffer, and either all
    buffers or none.
    """
    if torch.compiler.is_compiling() or params[0].device.type not in ("cpu", "cuda"):
        return False
    if isinstance(lr, Tensor) and lr.dtype != torch.float32:
        return False
    existing = [buffer for buffer in buffers if buffer is not None]
    return len(existing) in (0, len(params)) and all(
        tensor.stride() == param.stride()
        for tensors in (grads, existing)
        for tensor, param in zip(tensors, params, strict=False)
    )


def _check(name: str, value: float) -> None:
    """Raise ValueError unless `value` is in the range of the setting `name`."""
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"LARS: {name} must be at least 0 and finite, not {value!r}")
