"""The states of a round's candidates, from the driver's side."""

from __future__ import annotations

from raytrain_opt.errors import PoolError
from raytrain_opt.pools.commands import Pretrain, SendCandidateState, StateRef
from raytrain_opt.pools.protocol import Pool
from raytrain_opt.search.policy import CandidateResult, TryCandidates


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
