"""Scaling rules: the learning rate for another global batch size.

    B, lr    reference batch size and its learning rate        B', lr'    the new ones

    linear   lr' = lr B' / B          one update moves as far as B' / B of the earlier ones:
                                      Goyal et al. 2017 (arXiv 1706.02677)
    sqrt     lr' = lr sqrt(B' / B)    the variance of an update stays the same:
                                      Krizhevsky 2014 (arXiv 1404.5997)
    none     lr' = lr

Both rules hold up to a batch size that depends on the model and the data; for large B' / B,
start with a warm-up. Pure functions, free of torch.
"""

from __future__ import annotations

import math
from typing import Literal

ScalingRule = Literal["linear", "sqrt", "none"]


def scale_lr(rule: ScalingRule, lr: float, from_batch_size: int, to_batch_size: int) -> float:
    """Scale `lr` from one batch size to another. Raises ValueError for a size below 1."""
    if min(from_batch_size, to_batch_size) < 1:
        sizes = f"{to_batch_size} and {from_batch_size}"
        raise ValueError(f"batch sizes must be at least 1, not {sizes}")
    ratio = to_batch_size / from_batch_size
    return lr * {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[rule]
