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
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from raytrain_opt.optim.batched import BatchedOptimizer

PAPER_SCALE = 3e-4 / 6.4


def sgd_fraction(step: float, center: float, period: float) -> float:
    """Return (4), the fraction of SGD in the update after `step` others: from nearly 0 to 1."""
    x = 2.0 * (step - center) / period
    return 0.5 * math.exp(x) if x < 0 else min(1.0, 0.5 + 0.5 * x)


class RMSpropWarmup(BatchedOptimizer):
    """A mixture of RMSprop and momentum SGD that turns into momentum SGD alone.

    `rmsprop_scale` is the rate of RMSprop divided by that of SGD. Because it is a ratio, `lr`,
    and so every schedule and candidate, controls both parts. The default is the paper's 3e-4
    divided by its 6.4 (half of 0.1 x 32768 / 256); for another peak rate, start with
    3e-4 / peak. Center and period are in epochs of `steps_per_epoch` updates; their defaults are
    the paper's. `weight_decay` is added to the gradient before both parts use it.

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
        center_epochs: float = 10.0,
        period_epochs: float = 5.0,
        steps_per_epoch: int,
    ) -> None:
        settings = {
            "lr": lr,
            "momentum": momentum,
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "rmsprop_scale": rmsprop_scale,
            "center_epochs": center_epochs,
            "period_epochs": period_epochs,
        }
        for name, value in settings.items():
            positive, below_one = name in ("eps", "period_epochs"), name in ("momentum", "alpha")
            self._check(name, value, positive=positive, below_one=below_one)
        for name in ("center", "period"):
            settings[f"{name}_steps"] = settings.pop(f"{name}_epochs") * steps_per_epoch
        super().__init__(params, settings)

    def _update_group(self, group: dict[str, Any], params: list[Any]) -> None:
        count = self.state[group["params"][0]].setdefault("step", torch.zeros(()))
        sgd = sgd_fraction(count.item(), group["center_steps"], group["period_steps"])
        count += 1
        rmsprop = (1.0 - sgd) * group["rmsprop_scale"]
        for batch in self._batches(params):  # by (1) to (3), in place, in few kernels
            grads = [p.grad for p in batch]
            momenta = self._buffers("momentum_buffer", batch)
            squares = self._buffers("square_avg", batch)
            if group["weight_decay"] != 0:
                grads = list(torch._foreach_add(grads, batch, alpha=group["weight_decay"]))
            torch._foreach_mul_(momenta, group["momentum"])
            if rmsprop == 0:
                torch._foreach_add_(momenta, grads)
            else:
                torch._foreach_mul_(squares, group["alpha"])
                torch._foreach_addcmul_(squares, grads, grads, value=1.0 - group["alpha"])
                factors = list(torch._foreach_sqrt(squares))
                torch._foreach_add_(factors, group["eps"])
                torch._foreach_reciprocal_(factors)
                torch._foreach_mul_(factors, rmsprop)
                torch._foreach_add_(factors, sgd)
                torch._foreach_addcmul_(momenta, grads, factors)
            torch._foreach_add_(batch, momenta, alpha=-group["lr"])
