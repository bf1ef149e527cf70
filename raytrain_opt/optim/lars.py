"""Layer-wise adaptive rate scaling: You, Gitman and Ginsburg 2017 (arXiv 1708.03888).

    w, g     weights and gradient of a layer       |x|    Euclidean norm
    eta      trust coefficient                     d      weight decay
    m        momentum                              v      momentum buffer, 0 at first

    r = eta |w| / (|g| + d |w| + eps)              trust ratio of the layer            (1)
    r = min(r / lr, 1)                             instead, with LARC's clipping       (2)
    r = 1                                          if |w| = 0 or |g| = 0               (3)
    v = m v + r (g + d w)                                                              (4)
    w = w - lr v                                                                       (5)

The ratio multiplies the gradient before the momentum, and the rate the sum, so that a schedule
reaches all of v at once; You et al. put the rate into (4), which is the same while it stays.
(4) and (5) are torch's SGD on the adapted gradients r (g + d w), and are computed by it. `eps`
is ours, as in timm: it bounds r for a layer whose gradient nearly vanishes. (2) is NVIDIA
apex's LARC: the layer's rate is at most `lr`.

Norms are float32 (float64 of float64). No number is hidden: a layer whose gradient holds a NaN
becomes NaN, by (1). An infinite |g|, also one that overflows float32 (from about 1e19), gives
r = 0: the layer's finite elements stand still and infinite ones become NaN. Other layers are
not touched by it.
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

# Elements in a row of the scratch memory: no layer of a usual network wastes more than one row.
_ROW = 1024
# Elements of the layers whose ratios a CPU computes together.
_BLOCK = 2**16

# Parameters, their gradients, and their momentum buffers: None before the first step, and an
# empty list without momentum.
Batch = tuple[list[Tensor], list[Tensor], list[Tensor | None]]


class LARS(Optimizer):
    """SGD with momentum whose every layer moves in proportion to the norm of its weights.

    A group with `"adapt": False` does plain SGD with the group's own settings, as torch's does:
    that is how biases and normalisation are left out, see `parameter_groups`. All layers of a
    group go through few kernels and no step waits for the device; `lr` may be a tensor, which
    captured CUDA graphs read at every replay. On CUDA, the adapted gradients stay in memory of
    the optimiser's own, as large as the weights.

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
        """Also called by `load_state_dict`: a buffer is laid out as its parameter again."""
        super().__setstate__(state)
        self.__dict__.setdefault("_scratch", {})
        for param, values in self.state.items():
            buffer = values.get("momentum_buffer")
            if buffer is not None and buffer.stride() != param.stride():
                values["momentum_buffer"] = torch.empty_like(param).copy_(buffer)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient; gives what `closure` gives."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            for params, grads, buffers in self._batches(group):
                if not group["adapt"]:
                    _descend(params, grads, buffers, group, group["weight_decay"])
                elif _keeps_scratch(params[0].device):
                    adapted = self._scratch_for(index, params).adapted(grads, group)
                    _descend(params, adapted, buffers, group)
                elif _takes_numbers(params[0].device):
                    _update_by_numbers(params, grads, buffers, group)
                else:
                    _descend(params, _adapted(params, grads, group), buffers, group)
                self._keep(params, buffers)
        return loss

    def _batches(self, group: dict[str, Any]) -> Iterator[Batch]:
        """Parameters, gradients and buffers (None before the first step) of one device, type."""
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        grads = [p.grad for p in params]
        if any(grad.is_sparse or grad.is_complex() for grad in grads):
            raise RuntimeError("LARS takes dense real gradients only")
        buffers: list[Tensor | None] = []
        if group["momentum"] != 0:
            buffers = [self.state[p].get("momentum_buffer") for p in params]
        columns = cast(list[list[Tensor | None]], [params, grads, buffers])
        for batch, _ in Optimizer._group_tensors_by_device_and_dtype(columns).values():
            yield cast(Batch, tuple(batch))

    def _scratch_for(self, index: int, params: list[Tensor]) -> _Scratch:
        """That of the group's last step, unless other parameters have gradients now."""
        key = (index, params[0].device, params[0].dtype)
        scratch = self._scratch.get(key)
        if scratch is None or not scratch.fits(params):
            scratch = self._scratch[key] = _Scratch(params)
        return scratch

    def _keep(self, params: list[Tensor], buffers: list[Tensor | None]) -> None:
        for param, buffer in zip(params, buffers, strict=False):
            self.state[param]["momentum_buffer"] = buffer


def _keeps_scratch(device: torch.device) -> bool:
    """The compiler needs none: it makes few kernels of the formula by itself."""
    return device.type == "cuda" and not torch.compiler.is_compiling()


def _takes_numbers(device: torch.device) -> bool:
    """Whether a ratio can be read without waiting for anything."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


class _Scratch:
    """Memory for the adapted gradients of some layers, that one kernel scales by their ratios.

    It is a matrix whose rows belong to one layer each, the rest of a layer's last row being 0.
    (torch's `_foreach_mul_` by one number of the device per tensor is a kernel per tensor.)
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

    def fits(self, params: list[Tensor]) -> bool:
        """Whether it was made for these parameters and they lie in memory as they did."""
        return len(params) == len(self._params) and all(
            new is old and new.stride() == stride
            for new, old, stride in zip(params, self._params, self._strides, strict=True)
        )

    def adapted(self, grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """r (g + d w) of every layer, valid until the next call."""
        norms = torch._foreach_norm(self._params + grads, 2, self._norms.dtype)
        torch._foreach_copy_(self._norm_slots, norms)
        torch._foreach_copy_(self._grads, grads)
        if group["weight_decay"] != 0:
            torch._foreach_add_(self._grads, self._params, alpha=group["weight_decay"])
        ratios = _trust_ratios(self._norms, group)
        self._memory.mul_(ratios.index_select(0, self._owner).unsqueeze(1))
        return self._grads


def _update_by_numbers(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor | None],
    group: dict[str, Any],
) -> None:
    """One update on a CPU, a layer at a time, while it is in the caches: r g with decay r d.

    `buffers` gets those that are made.
    """
    for block in _blocks(params):
        norms = _norms(params[block], grads[block])
        for layer, r in enumerate(_trust_ratios(norms, group).tolist(), block.start):
            one = slice(layer, layer + 1)
            made = buffers[one]
            _descend(params[one], [grads[layer] * r], made, group, r * group["weight_decay"])
            buffers[one] = made


def _blocks(params: list[Tensor]) -> Iterator[slice]:
    """Layers whose ratios are computed together: small ones save calls, large ones caches."""
    start, size = 0, 0
    for index, param in enumerate(params):
        if size and size + param.numel() > _BLOCK:
            yield slice(start, index)
            start, size = index, 0
        size += param.numel()
    yield slice(start, len(params))


def _adapted(params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """r (g + d w) of every layer, as the compiler can fuse it."""
    ratios = list(_trust_ratios(_norms(params, grads), group).unbind())
    decayed = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
    torch._foreach_mul_(decayed, ratios)
    return decayed


def _norms(params: list[Tensor], grads: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(params + grads, 2, _norm_dtype(params[0])))


def _trust_ratios(norms: Tensor, group: dict[str, Any]) -> Tensor:
    """(1) to (3) for n layers. norms [2 n]: of their weights, then of their gradients."""
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
    """(4) and (5) with these as r g and this as r d; `buffers` gets those that are made."""
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
    """Whether torch's fused kernel takes them: it goes through memory as it lies, and has all
    buffers or none.
    """
    if torch.compiler.is_compiling() or params[0].device.type not in ("cpu", "cuda"):
        return False
    if isinstance(lr, Tensor) and lr.dtype != torch.float32:
        return False
    made = [buffer for buffer in buffers if buffer is not None]
    return len(made) in (0, len(params)) and all(
        tensor.stride() == param.stride()
        for tensors in (grads, made)
        for tensor, param in zip(tensors, params, strict=False)
    )


def _check(name: str, value: float) -> None:
    """Raise ValueError unless `value` is in the range of the setting `name`."""
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"LARS: {name} must be at least 0 and finite, not {value!r}")
