"""Learning rates for another batch size. Free of torch."""

import math
from typing import Literal

ScalingRule = Literal["linear", "sqrt", "none"]


def scale_lr(rule: ScalingRule, lr: float, from_batch_size: int, to_batch_size: int) -> float:
    """Scale `lr` from one batch size to another, by a factor of r or its square root.

    linear: an update moves as far as r of the earlier ones (Goyal et al. 2017, arXiv 1706.02677);
    sqrt: its variance stays the same (Krizhevsky 2014, arXiv 1404.5997). Both hold up to a batch
    size that depends on model and data; for a large r, start with a warm-up.
    """
    ratio = to_batch_size / from_batch_size
    return lr * {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[rule]
