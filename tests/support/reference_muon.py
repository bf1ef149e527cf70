"""The formulas of Muon taken literally, one parameter after another: slow, and easy to check.

See raytrain_opt/optim/muon.py for the notation. A filter bank is flattened to [out, in k k] as in
Jordan's implementation, whatever its order in memory. Used by tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def orthogonalize(u: Tensor) -> Tensor:
    """Compute (3) and (4) of one matrix."""
    x = u.T if u.shape[0] > u.shape[1] else u
    x = x / max(float(torch.linalg.matrix_norm(x)), 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if u.shape[0] > u.shape[1] else x


class ReferenceMuon:
    """Updates parameters of two dimensions or more by Muon, all others by SGD with momentum."""

    def __init__(self, params: list[Any], **settings: Any) -> None:
        self.settings = {"momentum": 0.6, "weight_decay": 0.0, **settings}
        self.params, self.buffers = params, [torch.zeros_like(param) for param in params]

    @torch.no_grad()
    def step(self, lr: float, aux_lr: float) -> None:
        """Update every parameter that has a gradient."""
        for param, buffer in zip(self.params, self.buffers, strict=True):
            if param.grad is not None:
                (self._orthogonal if param.dim() > 1 else self._sgd)(
                    param, buffer, lr if param.dim() > 1 else aux_lr
                )

    def _orthogonal(self, param: Any, buffer: Tensor, lr: float) -> None:
        m, s = self.settings["momentum"], self.settings
        buffer.copy_(m * buffer + (1 - m) * param.grad)
        u = (1 - m) * param.grad + m * buffer
        matrix = u.contiguous().reshape(len(u), -1)
        x = orthogonalize(matrix).reshape(param.shape)
        rows, columns = matrix.shape
        param.mul_(1 - lr * s["weight_decay"])
        param.sub_(lr * max(1, rows / columns) ** 0.5 * x)

    def _sgd(self, param: Any, buffer: Tensor, lr: float) -> None:
        m, s = self.settings["momentum"], self.settings
        buffer.copy_(m * buffer + param.grad)
        param.mul_(1 - lr * s["weight_decay"])
        param.sub_(lr * (param.grad + m * buffer))
