"""Optimizers for large batches: LARS, and the RMSprop warm-up.

LARS, layer-wise adaptive rate scaling: You, Gitman and Ginsburg 2017 (arXiv 1708.03888).

    w, g     weights and gradient of a layer       |x|    Euclidean norm
    eta      trust coefficient                     d      weight decay
    m        momentum                              v      momentum buffer, initially 0

    r = eta |w| / (|g| + d |w| + eps)              trust ratio of the layer            (1)
    r = 1                                          if |w| = 0 or |g| = 0               (2)
    v = m v + r (g + d w)                                                              (3)
    w = w - lr v                                                                       (4)

The rate multiplies the sum in (4), so that a schedule changes all of v at once; You et al. put it
into (3), which is the same while it is constant. torch's SGD computes (3) and (4). `eps` is an
addition, as in timm: it bounds r for a layer whose gradient nearly vanishes.

Norms are float32 (float64 for float64). A layer whose gradient holds a NaN becomes NaN, by (1);
with an infinite |g|, r is 0. Other layers are not affected.

RMSprop warm-up: RMSprop at first, momentum SGD later.

    w, g     weights and gradient, with weight decay added      m    running mean of g^2
    t        updates done before this one                       v    momentum buffer
    c, p     center and period of the transition, in updates    s    rmsprop_scale

    m = alpha m + (1 - alpha) g^2                                                       (1)
    v = momentum v + (a + b / (sqrt(m) + eps)) g                                        (2)
    w = w - lr v                                                                        (3)

    a = (1 + ELU(2 (t - c) / p)) / 2, at most 1                                         (4)
    b = s (1 - a)                                                                       (5)

`a` is the fraction of SGD. The paper prints the straight part of (4) with twice this slope; its
text, and the ELU that it names, agree with the form here. The paper's v has the opposite sign; v
is torch's momentum buffer here, so that from a = 1 on this is torch's SGD bit for bit.
Source: Akiba, Suzuki and Fukuda, Extremely Large Minibatch SGD, 2017 (arXiv 1711.04325).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from raytrain_opt.optim.batched import BatchedOptimizer, descend


class LARS(BatchedOptimizer):
    """SGD with momentum in which each layer moves in proportion to the norm of its weights.

    A group with `"adapt": False` is updated by torch's SGD with the group's settings: that is
    how biases and normalization are excluded, see `parameter_groups`. On a GPU few kernels update
    all layers of a group, no step waits for the device, and takes memory for twice the weights.

    Raises ValueError: a value out of its range. RuntimeError: sparse gradients or complex
    parameters.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eps": eps}
        settings["trust_coefficient"] = trust_coefficient
        self._check(settings)
        super().__init__(params, {**settings, "adapt": True})

    def _update_group(self, group: dict[str, Any], params: list[Any]) -> None:
        for batch in self._batches(params):
            grads = [p.grad for p in batch]
            buffers = self._buffers("momentum_buffer", batch)
            if not group["adapt"]:
                descend(batch, grads, buffers, group, group["weight_decay"])
            elif batch[0].device.type == "cpu":
                # Layer by layer, by r g with decay r d, while the CPU has it in its caches.
                for param, grad, buffer in zip(batch, grads, buffers, strict=True):
                    [r] = _trust_ratios([param], [grad], group).tolist()
                    descend([param], [grad * r], [buffer], group, r * group["weight_decay"])
            else:
                descend(batch, _adapted(batch, grads, group), buffers, group)


def _adapted(params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """Return r (g + d w) of every layer."""
    ratios = _trust_ratios(params, grads, group)
    adapted = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
    # A product with one device scalar per tensor would launch a kernel per tensor.
    factors = [r.expand(g.numel()) for r, g in zip(ratios.unbind(), adapted, strict=True)]
    parts = torch.split(torch.cat(factors), [g.numel() for g in adapted])
    same_layout = [
        part.as_strided(g.shape, g.stride()) for part, g in zip(parts, adapted, strict=True)
    ]
    torch._foreach_mul_(adapted, same_layout)
    return adapted


def _trust_ratios(params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> Tensor:
    """Compute (1) and (2) for all layers, from the norms of their weights and gradients."""
    dtype = torch.promote_types(params[0].dtype, torch.float32)
    weights, gradients = torch.stack(torch._foreach_norm(params + grads, 2, dtype)).chunk(2)
    denominators = torch.add(gradients, weights, alpha=group["weight_decay"]) + group["eps"]
    ratios = weights / denominators * group["trust_coefficient"]
    adapted: Tensor = ratios.masked_fill(torch.minimum(weights, gradients) == 0, 1.0)
    return adapted


PAPER_SCALE = 3e-4 / 6.4
_ALPHA, _EPS = 0.99, 1e-8


def sgd_fraction(step: float, center: float, period: float) -> float:
    """Return (4), the fraction of SGD in the update after `step` others: from nearly 0 to 1."""
    x = 2.0 * (step - center) / period
    return 0.5 * math.exp(x) if x < 0 else min(1.0, 0.5 + 0.5 * x)


class RMSpropWarmup(BatchedOptimizer):
    """A mixture of RMSprop and momentum SGD that turns into momentum SGD alone.

    `rmsprop_scale` is the rate of RMSprop divided by the rate of SGD, so `lr` controls both parts.
    The default is the paper's 3e-4 divided by its 6.4 (half of 0.1 x 32768 / 256); for another
    peak rate, start with 3e-4 / peak. Center and period are in epochs of `steps_per_epoch`
    updates; their defaults are the paper's. The state of a group's first parameter counts its
    updates (`step`).

    Raises ValueError: a value out of its range. RuntimeError: sparse or complex gradients.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        rmsprop_scale: float = PAPER_SCALE,
        center_epochs: float = 10.0,
        period_epochs: float = 5.0,
        steps_per_epoch: int,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        settings |= {"rmsprop_scale": rmsprop_scale, "center_epochs": center_epochs}
        settings["period_epochs"] = period_epochs
        self._check(settings)
        if not period_epochs:
            raise ValueError(f"RMSpropWarmup: period_epochs must be above 0, not {period_epochs}")
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
                torch._foreach_mul_(squares, _ALPHA)
                torch._foreach_addcmul_(squares, grads, grads, value=1.0 - _ALPHA)
                factors = list(torch._foreach_sqrt(squares))
                torch._foreach_add_(factors, _EPS)
                torch._foreach_reciprocal_(factors)
                torch._foreach_mul_(factors, rmsprop)
                torch._foreach_add_(factors, sgd)
                torch._foreach_addcmul_(momenta, grads, factors)
            torch._foreach_add_(batch, momenta, alpha=-group["lr"])
