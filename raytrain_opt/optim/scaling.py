"""What a learning rate that suits one global batch becomes at another.

    linear   lr (to / from)        the same weight for every sample: Goyal et al. 2017
    sqrt     lr sqrt(to / from)    the same noise of an update: Krizhevsky 2014
    none     lr

Pure functions, free of torch. Both rules hold up to a batch that depends on the model and data;
with large factors they want a warm-up.
"""

from __future__ import annotations

import math
from typing import Literal


def linear_scaling(lr: float, batch_size: int, reference_batch_size: int) -> float:
    """`lr`, meant for `reference_batch_size` samples an update, for `batch_size` of them."""
    return lr * _growth(batch_size, reference_batch_size)


def sqrt_scaling(lr: float, batch_size: int, reference_batch_size: int) -> float:
    """As `linear_scaling`, by the square root of the growth."""
    return lr * math.sqrt(_growth(batch_size, reference_batch_size))


def scale_lr(
    rule: Literal["linear", "sqrt", "none"], lr: float, from_batch_size: int, to_batch_size: int
) -> float:
    """`lr`, meant for `from_batch_size` samples an update, for `to_batch_size` by `rule`.

    Raises ValueError: a batch size below 1 (linear, sqrt).
    """
    match rule:
        case "linear":
            return linear_scaling(lr, to_batch_size, from_batch_size)
        case "sqrt":
            return sqrt_scaling(lr, to_batch_size, from_batch_size)
        case "none":
            return lr


def _growth(batch_size: int, reference_batch_size: int) -> float:
    if min(batch_size, reference_batch_size) < 1:
        raise ValueError(
            f"batch sizes must be at least 1, not {batch_size} and {reference_batch_size}"
        )
    return batch_size / reference_batch_size
