"""Whether candidates have learned enough for a decision.

    U   validation loss of the candidate that hardly trained (the highest, of several optimizers);
        of several optimizers of a classifier, at most the loss of a guess by class frequency
    L   validation loss of the best candidate
    e   standard error of L over the samples of the validation split

    decided     U - L > max(3 e, 0.01 |U|)
    replaces    another optimizer replaces the preferred one if its L is lower by more than its e

A network that hardly trained says nearly the same of every sample, so the standard error of the
differences, sample by sample, is about e. A fall of less than a hundredth is that of a network
that has learned how frequent the classes are, and nothing of their samples. The loss of a network
that starts with confident guesses falls by more than that while it learns no more: hence the limit
of U. Above it a lower loss says something about rates, but nothing about optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from raytrain_opt.search.policy import CandidateResult

_ERRORS, _LEAST_FALL = 3.0, 0.01


def guessing_loss(class_counts: Sequence[int], label_smoothing: float = 0.0) -> float:
    """Return the cross entropy of a guess by the frequencies of classes; infinite without any."""
    if not class_counts:
        return math.inf
    even = label_smoothing / len(class_counts)
    shares = [even + (1 - label_smoothing) * n / sum(class_counts) for n in class_counts]
    return -math.fsum(share * math.log(share) for share in shares if share)


def noise(best: CandidateResult, untrained: float) -> float:
    """Return by how much the best loss has to be below that of a network that hardly trained."""
    return max(_ERRORS * best.val_loss_error, _LEAST_FALL * abs(untrained))


def has_learned(best: CandidateResult, untrained: float) -> bool:
    """Return whether the best candidate says anything about optimizers and rates."""
    return untrained - best.val_loss > noise(best, untrained)


def is_better(other: CandidateResult, preferred: CandidateResult) -> bool:
    """Return whether another optimizer's best candidate replaces that of the preferred one."""
    return preferred.val_loss - other.val_loss > other.val_loss_error
