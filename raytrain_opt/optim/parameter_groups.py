"""Which parameters decay: biases and normalisation are left out of it, and of LARS' ratio.

Their few values set scales and offsets; drawing them to zero, or moving them in proportion to
their norm, costs accuracy at large batches (Goyal et al. 2017; You et al. 2017).
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_NORMALISATION = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def parameter_groups(model: nn.Module, *, exclude_bias_and_norm: bool) -> list[dict[str, Any]]:
    """All parameters of `model` in the groups that an optimiser takes, shared ones once.

    When excluding: first the weights of two or more dimensions, then, with `weight_decay` 0
    and `adapt` False (which `LARS` reads and other optimisers pass over), everything of fewer
    dimensions and everything of normalisation layers. A group without parameters is left out.
    """
    if not exclude_bias_and_norm:
        groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    else:
        of_norm = {
            id(param)
            for module in model.modules()
            if isinstance(module, _NORMALISATION)
            for param in module.parameters(recurse=False)
        }
        out = {id(p) for p in model.parameters() if p.dim() < 2 or id(p) in of_norm}
        groups = [
            {"params": [p for p in model.parameters() if id(p) not in out]},
            {
                "params": [p for p in model.parameters() if id(p) in out],
                "weight_decay": 0.0,
                "adapt": False,
            },
        ]
    return [group for group in groups if group["params"]]
