"""The states of a round's candidates, from the driver's side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raytrain_opt.errors import PoolError
from raytrain_opt.pools.commands import Pretrain, SendCandidateState, StateRef
from raytrain_opt.pools.protocol import Pool, StateStore
from raytrain_opt.search.policy import CandidateResult, TryCandidates
from raytrain_opt.train.weight_average import average_states


def fetch_candidate_state(
    pool: Pool, start: StateRef, action: TryCandidates, result: CandidateResult
) -> StateRef:
    """Return the state of a candidate after the kept steps; the round began with `start`."""
    residents = pool.alive()
    # Prefer the slot that trained the candidate; any other can train it again. Of workers, all
    # have it, and rank 0, the first, sends it.
    for index in sorted(residents, key=lambda index: index != result.slot):
        pretrain = Pretrain(start, action, residents)
        replies = pool.command(SendCandidateState(pretrain, result.candidate, index), (index,))
        if replies:
            state: StateRef = replies[index]
            return state
    raise PoolError(f"epoch {action.epoch}: no slot is left to send the winner's state")


def average_candidates(
    pool: Pool,
    states: StateStore,
    start: StateRef,
    action: TryCandidates,
    averaged: Sequence[CandidateResult],
) -> StateRef:
    """Average in the driver, which reads the states of all slots without a copy."""
    # The last candidate of a slot is still in its model; loading another would displace it.
    last_first = sorted(averaged, key=lambda r: r.candidate.index, reverse=True)
    by_index = {
        r.candidate.index: states.get(fetch_candidate_state(pool, start, action, r))
        for r in last_first
    }
    mean = average_states([by_index[r.candidate.index] for r in averaged])
    return replace(states.put(f"{action.epoch}.average", mean), sha256=mean.digest())
