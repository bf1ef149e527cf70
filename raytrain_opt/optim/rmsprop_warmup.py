"""RMSprop warm-up: RMSprop at first, momentum SGD later.

    w, g     weights and gradient, with weight decay added      m    running mean of g^2
    t        updates done before this one                       v    momentum buffer
    c, p     center and period of the transition, in updates    s    rmsprop_scale

    m = alpha m + (1 - alpha) g^2                                                       (1)
    v = momentum v + (a + b / (sqrt(m) + eps)) g                                        (2)
    w = w - lr v                                                                        (3)

    a = (1 + ELU(2 (t - c) / p)) / 2, at most 1                                         (4)
      = exp(2 (t - c) / p) / 2       for t < c
      = 1/2 + (t - c) / p            for c <= t < c + p / 2
      = 1                            afterwards
    b = s (1 - a)                                                                       (5)

`a` is the fraction of SGD. The paper prints the straight part of (4) with twice this slope, so
that it would pass 1 halfway and drop back to it; its text, and the ELU that it names, agree with
the form here, which is smooth at c and reaches 1 where the paper says. The paper's v has the
opposite sign; v is torch's momentum buffer here, so that from a = 1 on this is torch's SGD bit
for bit.
Source: Akiba, Suzuki and Fukuda, Extremely Large Minibatch SGD, 2017 (arXiv 1711.04325).
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


def sgd_fraction(step: float, center: float, period: float) -> float:
    """Return (4), the fraction of SGD in the update after `step` others: from nearly 0 to 1."""
    x = 2.0 * (step - center) / period
    return 0.5 * math.exp(x) if x < 0 else min(1.0, 0.5 + 0.5 * x)


class RMSpropWarmup(Optimizer):
    """A mixture of RMSprop and momentum SGD that turns into momentum SGD alone.

    `rmsprop_scale` is the rate of RMSprop divided by that of SGD. Because it is a ratio, `lr`,
    and so every schedule and candidate, controls both parts. The default is the paper's 3e-4
    divided by its 6.4 (half of 0.1 x 32768 / 256); for another peak rate, start with
    3e-4 / peak. `center_steps` and `period_steps` are in updates; the paper's are 10 and 5
    epochs. `weight_decay` is added to the gradient before both parts use it.

    The updates of a group are counted in the state of its first parameter (`step`), so a copy
    of the state continues the transition at the same point.

    Raises ValueError: a value out of its range. RuntimeError: sparse or complex gradients.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.9,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        rmsprop_scale: float = PAPER_SCALE,
        center_steps: float,
        period_steps: float,
    ) -> None:
        settings = {
            "lr": lr,
            "momentum": momentum,
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "rmsprop_scale": rmsprop_scale,
            "center_steps": center_steps,
            "period_steps": period_steps,
        }
        for name, value in settings.items():
            _check(name, value)
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return the loss of `closure`."""
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
            raise RuntimeError("RMSpropWarmup needs dense real gradients")
        sgd, rmsprop = self._count_and_mix(group)
        if not params:
            return
        momenta = self._buffers(params, "momentum_buffer")
        squares = self._buffers(params, "square_avg")
        columns = cast(list[list[Tensor | None]], [params, grads, momenta, squares])
        for batch, _ in Optimizer._group_tensors_by_device_and_dtype(columns).values():
            p, g, v, m = cast(list[list[Tensor]], batch)
            _update(p, g, v, m, group, sgd, rmsprop)

    def _count_and_mix(self, group: dict[str, Any]) -> tuple[float, float]:
        """Count this update and return its (4) and (5)."""
        first = group["params"][0]
        count = self.state[first].get("step")
        if count is None:
            count = self.state[first]["step"] = torch.zeros(())
        sgd = sgd_fraction(count.item(), group["center_steps"], group["period_steps"])
        count += 1
        return sgd, (1.0 - sgd) * group["rmsprop_scale"]

    def _buffers(self, params: list[Tensor], name: str) -> list[Tensor]:
        for param in params:
            if name not in self.state[param]:
                zeros = torch.zeros_like(param, memory_format=torch.preserve_format)
                self.state[param][name] = zeros
        return [self.state[param][name] for param in params]


def _update(
    params: list[Tensor],
    grads: list[Tensor],
    momenta: list[Tensor],
    squares: list[Tensor],
    group: dict[str, Any],
    sgd: float,
    rmsprop: float,
) -> None:
    """Update tensors of one device and type by (1) to (3), in place, in few kernels."""
    if group["weight_decay"] != 0:
        grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
    torch._foreach_mul_(momenta, group["momentum"])
    if rmsprop == 0:
        torch._foreach_add_(momenta, grads)
    else:
        factors = _gradient_factors(grads, squares, group, sgd, rmsprop)
        torch._foreach_addcmul_(momenta, grads, factors)
    torch._foreach_add_(params, momenta, alpha=-group["lr"])


def _gradient_factors(
    grads: list[Tensor],
    squares: list[Tensor],
    group: dict[str, Any],
    sgd: float,
    rmsprop: float,
) -> list[Tensor]:
    """Return the factor of g in (2) for every weight, with (1) of this update."""
    torch._foreach_mul_(squares, group["alpha"])
    torch._foreach_addcmul_(squares, grads, grads, value=1.0 - group["alpha"])
    factors = list(torch._foreach_sqrt(squares))
    torch._foreach_add_(factors, group["eps"])
    torch._foreach_reciprocal_(factors)
    torch._foreach_mul_(factors, rmsprop)
    torch._foreach_add_(factors, sgd)
    return factors


def _check(name: str, value: float) -> None:
    """Raise ValueError unless `value` is in the range of the setting `name`."""
    positive = name in ("eps", "period_steps")
    below_one = name in ("momentum", "alpha")
    fine = (value > 0 if positive else value >= 0) and (value < 1 if below_one else True)
    if not (fine and math.isfinite(value)):
        allowed = f"{'above' if positive else 'at least'} 0{' and below 1' if below_one else ''}"
        raise ValueError(f"RMSpropWarmup: {name} must be {allowed}, not {value!r}")
