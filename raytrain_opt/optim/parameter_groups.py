"""Parameter groups: biases and normalization layers without weight decay and trust ratio.

Their few values set scales and offsets. Weight decay, which pulls them to zero, or a trust
ratio, which moves them in proportion to their norm, costs accuracy at large batch sizes.
Sources: Goyal et al. 2017 (arXiv 1706.02677); You, Gitman and Ginsburg 2017
(arXiv 1708.03888).
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_NORMALIZATION = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def parameter_groups(model: nn.Module, *, exclude_bias_and_norm: bool) -> list[dict[str, Any]]:
    """Return all parameters of `model` in groups for an optimizer, shared ones once.

    With `exclude_bias_and_norm`, the second group holds all parameters of normalization layers
    and those of fewer than two dimensions, with `weight_decay` 0 and `adapt` False (which
    `LARS` reads and other optimizers ignore); the first group holds the others. Empty groups
    are left out.
    """
    if not exclude_bias_and_norm:
        groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    else:
        of_norm = {
            id(param)
            for module in model.modules()
            if isinstance(module, _NORMALIZATION)
            for param in module.parameters(recurse=False)
        }
        excluded = {id(p) for p in model.parameters() if p.dim() < 2 or id(p) in of_norm}
        groups = [
            {"params": [p for p in model.parameters() if id(p) not in excluded]},
            {
                "params": [p for p in model.parameters() if id(p) in excluded],
                "weight_decay": 0.0,
                "adapt": False,
            },
        ]
    return [group for group in groups if group["params"]]
