"""Whose weights a run continues from after a round: the winner's, or a mean of candidates.

Source of averaging models trained at different learning rates from one start: Wortsman et al.,
Model soups, ICML 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raytrain_opt.config.learning_rate import StptPolicy
from raytrain_opt.search.policy import CandidateResult


def candidates_to_average(
    section: StptPolicy,
    winner: CandidateResult,
    results: Sequence[CandidateResult],
    scores: Sequence[float],
) -> tuple[CandidateResult, ...]:
    """Return the candidates whose states are averaged, without those that diverged.

    The winner comes first, then the others by score. Empty when the winner's own state is used.
    """
    if section.merge == "best":
        return ()
    ranked = sorted(zip(scores, results, strict=True), key=lambda pair: -pair[0])
    others = [r for _, r in ranked if r.status == "ok" and r.candidate != winner.candidate]
    limit = section.top_k if section.merge == "top_k_average" else None
    averaged = [winner, *others][:limit]
    return tuple(replace(r, val_losses=()) for r in averaged) if len(averaged) > 1 else ()
