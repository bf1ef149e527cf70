"""Comparing candidates on the same samples: what noise is, and what is more than noise.

A candidate is known by its mean losses on groups of samples of the selection split, the same
groups for all. The standard error of the difference of two candidates comes from the groups'
differences, in which what makes a sample easy or hard for both cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from raytrain_opt.search.policy import CandidateResult

# So many groups tell the error of a mean well enough, and stay small in a run's history.
MOST_GROUPS = 64

Losses = tuple[float, ...]


def grouped(losses: Sequence[float]) -> Losses:
    """Means of neighbours, at most MOST_GROUPS of them."""
    size = max(1, math.ceil(len(losses) / MOST_GROUPS))
    groups = [losses[start : start + size] for start in range(0, len(losses), size)]
    return tuple(_mean(group) for group in groups)


def losses_of(result: CandidateResult) -> Losses:
    """A candidate's groups; its mean loss alone where the blocks were not kept apart."""
    return grouped(result.val_losses or (result.val_loss,))


def errors_behind(losses: Losses, best: Losses) -> float:
    """By how many standard errors the mean of `losses` is above (worse than) that of `best`.

    With a single group there is no error to be known: any difference counts.
    """
    differences = [a - b for a, b in zip(losses, best, strict=True)]
    mean = _mean(differences)
    if mean == 0:
        return 0.0
    squares = sum((difference - mean) ** 2 for difference in differences)
    count = len(differences)
    error = math.sqrt(squares / (count - 1) / count) if count > 1 else 0.0
    return mean / error if error > 0 else math.copysign(math.inf, mean)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
