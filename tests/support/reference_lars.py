"""The formula of LARS taken literally, one layer after another: slow, and easy to check.

See raytrain_opt/optim/large_batch.py for the notation. As in most public implementations, the
norms are read as Python numbers, so every layer waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ReferenceLARS(torch.optim.Optimizer):
    """The reference, with the arguments, groups and state of `large_batch.LARS`."""

    def __init__(self, params: Any, lr: float, **settings: Any) -> None:
        defaults = {
            "momentum": 0.9,
            "weight_decay": 0.0,
            "trust_coefficient": 0.001,
            "eps": 1e-8,
            "adapt": True,
        }
        assert settings.keys() <= defaults.keys()
        super().__init__(params, {"lr": lr, **defaults, **settings})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        change = grad.add(param, alpha=group["weight_decay"])
        if group["adapt"]:
            change.mul_(trust_ratio(param, grad, group))
        if group["momentum"] != 0:
            state = self.state[param]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = change.clone()
            else:
                state["momentum_buffer"].mul_(group["momentum"])
                state["momentum_buffer"].add_(change)
            change = state["momentum_buffer"]
        param.add_(change, alpha=-float(group["lr"]))


def trust_ratio(param: Tensor, grad: Tensor, group: dict[str, Any]) -> float:
    """Return r of one layer, by (1) and (2)."""
    dtype = torch.promote_types(param.dtype, torch.float32)
    weight = torch.linalg.vector_norm(param, dtype=dtype).item()
    gradient = torch.linalg.vector_norm(grad, dtype=dtype).item()
    if weight == 0 or gradient == 0:
        return 1.0
    ratio: float = group["trust_coefficient"] * weight
    ratio /= gradient + group["weight_decay"] * weight + group["eps"]
    return ratio
