"""Rounds of candidates on a pool: in waves, in segments, and from where they were interrupted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from pydantic import Field

from raytrain_opt.errors import PoolError
from raytrain_opt.pools.commands import CandidatePart, Pretrain, SendCandidateState, StateRef
from raytrain_opt.pools.interface import IsDue, Pool, Segments
from raytrain_opt.results import TrainTotals
from raytrain_opt.search.policy import Candidate, CandidateResult, TryCandidates


@dataclass(frozen=True)
class RoundProgress:
    """What of a round is done: results, and the first steps of candidates without one."""

    action: TryCandidates
    results: tuple[CandidateResult, ...] = ()  # in the order of the candidates
    totals: dict[int, TrainTotals] = field(default_factory=dict)  # of those steps, by index
    # After those steps; and of the candidate that is the best so far, where it was saved.
    states: Annotated[dict[int, StateRef], Field(exclude=True)] = field(default_factory=dict)

    @property
    def left(self) -> tuple[Candidate, ...]:
        """The candidates without a result."""
        done = {result.candidate.index for result in self.results}
        return tuple(c for c in self.action.candidates if c.index not in done)

    def steps_since(self, before: RoundProgress) -> int:
        """Return the most steps that a candidate has trained since then."""
        now, then = self._steps(), before._steps()
        return max((steps - then.get(index, 0) for index, steps in now.items()), default=0)

    def _steps(self) -> dict[int, int]:
        whole = {result.candidate.index: self.action.pretrain_steps for result in self.results}
        return whole | {index: totals.steps for index, totals in self.totals.items()}

    def after(self, replies: Mapping[Candidate, object]) -> RoundProgress:
        """Return the progress with the replies to a `Pretrain`; without one, one is lost."""
        totals, states = dict(self.totals), dict(self.states)
        results = {result.candidate.index: result for result in self.results}
        for candidate, reply in replies.items():
            index = candidate.index
            if isinstance(reply, CandidatePart):
                assert reply.state is not None
                totals[index], states[index] = reply.totals, reply.state
                continue
            totals.pop(index, None)
            states.pop(index, None)
            if not isinstance(reply, CandidateResult):
                reply = CandidateResult.lost(candidate)
            results[index] = reply
        in_order = tuple(results[c.index] for c in self.action.candidates if c.index in results)
        return RoundProgress(self.action, in_order, totals, states)


class CandidateTraining:
    """How a pool trains rounds: slots a candidate each, workers one after the other together."""

    def __init__(self, pool: Pool, *, together: bool) -> None:
        self._pool, self._together = pool, together
        self._segments = Segments(pool)

    def train(
        self,
        start: StateRef,
        progress: RoundProgress,
        *,
        until: int | None = None,
        is_due: IsDue = lambda: False,
    ) -> RoundProgress:
        """Train the next wave from `start`: all its steps, or `until`, or until `is_due`.

        A candidate whose slot died too often is `lost`. Raises PoolError if all slots did.
        """
        residents = self._pool.alive()
        wave = dict(zip((0,) if self._together else residents, progress.left, strict=False))
        parts = {
            index: CandidatePart(totals, progress.states[index])
            for index, totals in progress.totals.items()
        }
        command = Pretrain(start, progress.action, wave, parts, until)
        replies = self._segments.command(command, is_due, residents) if residents else {}
        if not replies:
            text = "every slot died more often than max_restarts allows"
            raise PoolError(f"epoch {progress.action.epoch}: {text}")
        return progress.after({c: replies.get(rank) for rank, c in wave.items()})

    def with_best(self, start: StateRef, progress: RoundProgress) -> RoundProgress:
        """Return the progress with the state of the best candidate, if it may be kept."""
        results, action = progress.results, progress.action
        best = action.best(results) if results and action.keeps_winner else None
        if best is None or best.status != "ok":
            return progress
        parts = {index: progress.states[index] for index in progress.totals}
        ref = self.fetch_state(start, progress, best)
        return replace(progress, states={**parts, best.candidate.index: ref})

    def describe_lost(self, action: TryCandidates, results: Sequence[CandidateResult]) -> str:
        """Return a message on candidates whose slot died too often; empty if there are none."""
        lrs = ", ".join(f"{r.candidate.lr:.3g}" for r in results if r.status == "lost")
        pool = self._pool
        return lrs and (
            f"epoch {action.epoch}: learning rate {lrs} is left out: its slot died more often "
            "than max_restarts allows, or made no progress within timeouts.no_progress_s; "
            f"{len(pool.alive())} of {pool.size} slots are left"
        )

    def train_round(self, start: StateRef, action: TryCandidates) -> list[CandidateResult]:
        """Train and score every candidate from `start`; return the results in their order."""
        progress = RoundProgress(action)
        while progress.left:
            progress = self.train(start, progress)
        return list(progress.results)

    def fetch_state(
        self, start: StateRef, progress: RoundProgress, result: CandidateResult
    ) -> StateRef:
        """Return a candidate's state after the steps of a round from `start`, or PoolError."""
        candidate, action = result.candidate, progress.action
        if candidate.index in progress.states:
            return progress.states[candidate.index]
        residents, command = self._pool.alive(), Pretrain(start, action, {})
        # Prefer the slot that trained the candidate; any other can train it again. Of workers, all
        # have it, and rank 0, the first, sends it.
        for index in sorted(residents, key=lambda index: index != result.slot):
            replies = self._pool.command(SendCandidateState(command, candidate, index), (index,))
            if replies:
                state: StateRef = replies[index]
                return state
        raise PoolError(f"epoch {action.epoch}: no slot is left to send the winner's state")
