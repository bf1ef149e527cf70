"""Comparing candidates on the same samples, to distinguish a difference from noise.

A candidate is represented by its mean losses on groups of samples of the validation split, the
same groups for all candidates. The standard error of the difference of two candidates comes from
the differences per group, in which cancels what makes a sample easy or hard for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from raytrain_opt.search.policy import CandidateResult

# Enough groups to estimate the error of a mean, and few enough to keep in a run's history.
MAX_GROUPS = 64

Losses = tuple[float, ...]


def group_losses(losses: Sequence[float]) -> Losses:
    """Return the means of neighboring losses, at most MAX_GROUPS of them."""
    size = max(1, math.ceil(len(losses) / MAX_GROUPS))
    groups = [losses[start : start + size] for start in range(0, len(losses), size)]
    return tuple(_mean(group) for group in groups)


def losses_of(result: CandidateResult) -> Losses:
    """Return a candidate's groups; its mean loss alone when blocks were not scored."""
    return group_losses(result.val_losses or (result.val_loss,))


def z_score(losses: Losses, reference: Losses) -> float:
    """Return by how many standard errors the mean of `losses` exceeds that of `reference`.

    Positive is worse. With a single group there is no standard error: any difference counts as
    infinitely many.
    """
    differences = [a - b for a, b in zip(losses, reference, strict=True)]
    mean = _mean(differences)
    if mean == 0:
        return 0.0
    squares = sum((difference - mean) ** 2 for difference in differences)
    count = len(differences)
    error = math.sqrt(squares / (count - 1) / count) if count > 1 else 0.0
    return mean / error if error > 0 else math.copysign(math.inf, mean)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
