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


def linear_scaling(lr: float, batch_size: int, reference_batch_size: int) -> float:
    """Return the rate for `batch_size`, given the rate `lr` for `reference_batch_size`.

    Raises ValueError for a batch size below 1.
    """
    return lr * _ratio(batch_size, reference_batch_size)


def sqrt_scaling(lr: float, batch_size: int, reference_batch_size: int) -> float:
    """Return the rate as `linear_scaling` does, but by the square root of the ratio."""
    return lr * math.sqrt(_ratio(batch_size, reference_batch_size))


def scale_lr(
    rule: Literal["linear", "sqrt", "none"], lr: float, from_batch_size: int, to_batch_size: int
) -> float:
    """Scale `lr` from one batch size to another by the rule.

    Raises ValueError for a batch size below 1 (linear, sqrt).
    """
    match rule:
        case "linear":
            return linear_scaling(lr, to_batch_size, from_batch_size)
        case "sqrt":
            return sqrt_scaling(lr, to_batch_size, from_batch_size)
        case "none":
            return lr


def _ratio(batch_size: int, reference_batch_size: int) -> float:
    if min(batch_size, reference_batch_size) < 1:
        raise ValueError(
            f"batch sizes must be at least 1, not {batch_size} and {reference_batch_size}"
        )
    return batch_size / reference_batch_size
