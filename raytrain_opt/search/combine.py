"""Whose weights go on after a round: the winner's, or the mean of several candidates'.

Source of averaging models trained at different learning rates from one start: Wortsman et al.,
Model soups, ICML 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raytrain_opt.config.learning_rate import CandidatePolicy
from raytrain_opt.search.policy import CandidateResult


def members_of_average(
    section: CandidatePolicy,
    winner: CandidateResult,
    results: Sequence[CandidateResult],
    scores: Sequence[float],
) -> tuple[CandidateResult, ...]:
    """Those whose states are averaged: the winner, then the others by their scores, without what
    diverged. Empty where the winner's state goes on as it is.
    """
    if section.combine == "best":
        return ()
    ranked = sorted(zip(scores, results, strict=True), key=lambda pair: -pair[0])
    others = [r for _, r in ranked if r.status == "ok" and r.candidate != winner.candidate]
    wanted = section.top_k if section.combine == "top_k_average" else None
    members = [winner, *others][:wanted]
    return tuple(replace(r, val_losses=()) for r in members) if len(members) > 1 else ()
