"""RMSprop at first, momentum SGD later: Akiba, Suzuki and Fukuda 2017 (arXiv 1711.04325).

    m     = alpha m + (1 - alpha) g^2
    delta = momentum delta + (a_sgd + a_rmsprop / (sqrt(m) + eps)) g
    w     = w - lr delta

    a_sgd = (1 + ELU(2 (t - center) / period)) / 2, at most 1, after t updates
          = exp(2 (t - center) / period) / 2      before `center`
          = 1/2 + (t - center) / period           from `center` to `center` + `period` / 2
          = 1                                     afterwards
    a_rmsprop = (1 - a_sgd) rmsprop_scale

The paper prints the straight part with twice this slope, so that it would pass 1 half-way and
fall back to it; the text and the likeness to an ELU that it states agree with the form here,
which is smooth at `center` and reaches 1 just where the paper says. Its delta has the other
sign; ours is torch's momentum buffer, so that afterwards this is torch's SGD bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

PAPER_SCALE = 3e-4 / 6.4


def sgd_share(step: float, center: float, period: float) -> float:
    """a_sgd of an update that follows `step` others: from nearly 0 up to 1."""
    x = 2.0 * (step - center) / period
    return 0.5 * math.exp(x) if x < 0 else min(1.0, 0.5 + 0.5 * x)


class RMSpropWarmup(Optimizer):
    """A mixture of RMSprop and momentum SGD that passes to momentum SGD alone.

    `rmsprop_scale` is the rate of RMSprop over that of SGD. As a ratio it lets `lr`, and so
    every schedule and every candidate, steer both parts. The default is the paper's 3e-4 over
    its 6.4 (half of 0.1 x 32768 / 256): with another peak rate, 3e-4 / peak is where to start.
    `center_steps` and `period_steps` are in updates; the paper's are those of 10 and 5 epochs.
    `weight_decay` is added to the gradient before both parts see it.

    The updates of a group are counted in the state of its first parameter (`step`), so that
    whatever carries the state carries the place in the transition. With `capturable` the count
    is on the device and `lr` may be a tensor there: no step reads anything back, and a captured
    graph moves on. Raises ValueError: a value out of its range. RuntimeError: sparse or
    complex gradients; a graph captured without `capturable`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        *,
        momentum: float = 0.9,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        rmsprop_scale: float = PAPER_SCALE,
        center_steps: float,
        period_steps: float,
        capturable: bool = False,
    ) -> None:
        if isinstance(lr, Tensor) and not capturable:
            raise ValueError("lr is a tensor: this needs capturable=True, or give a number")
        settings = {
            "momentum": momentum,
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "rmsprop_scale": rmsprop_scale,
            "center_steps": center_steps,
            "period_steps": period_steps,
        }
        if not isinstance(lr, Tensor):
            _check("lr", lr)
        for name, value in settings.items():
            _check(name, value)
        super().__init__(params, {"lr": lr, **settings, "capturable": capturable})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient; gives what `closure` gives."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["params"]:
                self._update_group(group)
        return loss

    def _update_group(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        grads = [p.grad for p in params]
        if any(grad.is_sparse or grad.is_complex() for grad in grads):
            raise RuntimeError("RMSpropWarmup takes dense real gradients only")
        a_sgd, a_rmsprop = self._shares(group)
        if not params:
            return
        deltas = self._buffers(params, "momentum_buffer")
        squares = self._buffers(params, "square_avg")
        columns = cast(list[list[Tensor | None]], [params, grads, deltas, squares])
        for same, _ in Optimizer._group_tensors_by_device_and_dtype(columns).values():
            p, g, d, m = cast(list[list[Tensor]], same)
            _update(p, g, d, m, group, a_sgd, a_rmsprop)

    def _shares(self, group: dict[str, Any]) -> tuple[float | Tensor, float | Tensor]:
        """a_sgd and a_rmsprop of this update, which is counted; tensors if capturable."""
        first = group["params"][0]
        count = self.state[first].get("step")
        if count is None:
            device = first.device if group["capturable"] else "cpu"
            count = self.state[first]["step"] = torch.zeros((), dtype=torch.float32, device=device)
        scale, times = group["rmsprop_scale"], (group["center_steps"], group["period_steps"])
        if group["capturable"]:
            share: float | Tensor = _sgd_share_on_device(count, *times)
        elif _capturing():
            raise RuntimeError("RMSpropWarmup in a captured graph needs capturable=True")
        else:
            share = sgd_share(count.item(), *times)
        count += 1
        return share, (1.0 - share) * scale

    def _buffers(self, params: list[Tensor], name: str) -> list[Tensor]:
        for param in params:
            if name not in self.state[param]:
                zeros = torch.zeros_like(param, memory_format=torch.preserve_format)
                self.state[param][name] = zeros
        return [self.state[param][name] for param in params]


def _update(
    params: list[Tensor],
    grads: list[Tensor],
    deltas: list[Tensor],
    squares: list[Tensor],
    group: dict[str, Any],
    a_sgd: float | Tensor,
    a_rmsprop: float | Tensor,
) -> None:
    """One update of tensors of one device and type, in place, in few kernels."""
    lr = group["lr"]
    if group["weight_decay"] != 0:
        grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
    torch._foreach_mul_(deltas, group["momentum"])
    if not isinstance(a_rmsprop, Tensor) and a_rmsprop == 0:
        torch._foreach_add_(deltas, grads)
    else:
        weights = _weights(grads, squares, group, a_sgd, a_rmsprop)
        torch._foreach_addcmul_(deltas, grads, weights)
    if isinstance(lr, Tensor):
        torch._foreach_add_(params, torch._foreach_mul(deltas, -lr))
    else:
        torch._foreach_add_(params, deltas, alpha=-lr)


def _weights(
    grads: list[Tensor],
    squares: list[Tensor],
    group: dict[str, Any],
    a_sgd: float | Tensor,
    a_rmsprop: float | Tensor,
) -> list[Tensor]:
    """a_sgd + a_rmsprop / (sqrt(m) + eps) of every weight, with m of this update."""
    torch._foreach_mul_(squares, group["alpha"])
    torch._foreach_addcmul_(squares, grads, grads, value=1.0 - group["alpha"])
    weights = list(torch._foreach_sqrt(squares))
    torch._foreach_add_(weights, group["eps"])
    torch._foreach_reciprocal_(weights)
    torch._foreach_mul_(weights, _beside(a_rmsprop, weights[0]))
    torch._foreach_add_(weights, _beside(a_sgd, weights[0]))
    return weights


def _beside(share: float | Tensor, tensor: Tensor) -> Any:
    """A share as a kernel over `tensor`s takes it: a number, or on their device."""
    return share.to(tensor.device) if isinstance(share, Tensor) else share


def _capturing() -> bool:
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return started and torch.cuda.is_current_stream_capturing()


def _sgd_share_on_device(step: Tensor, center: float, period: float) -> Tensor:
    x = 2.0 * (step - center) / period
    return torch.where(x < 0, 0.5 * torch.exp(x), (0.5 + 0.5 * x).clamp(max=1.0))


def _check(name: str, value: float) -> None:
    """Raise ValueError unless `value` is in the range of the setting `name`."""
    positive = name in ("eps", "period_steps")
    below_one = name in ("momentum", "alpha")
    fine = (value > 0 if positive else value >= 0) and (value < 1 if below_one else True)
    if not (fine and math.isfinite(value)):
        allowed = f"{'above' if positive else 'at least'} 0{' and below 1' if below_one else ''}"
        raise ValueError(f"RMSpropWarmup: {name} must be {allowed}, not {value!r}")
