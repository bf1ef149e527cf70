"""Let a resident train a round, as the driver does."""

from __future__ import annotations

from typing import Any

from raytrain_opt.pools.commands import OnStep, Pretrain, StateRef
from raytrain_opt.pools.worker import Slot, Worker
from raytrain_opt.search.policy import TryCandidates


def ignore(_done: int, _total: int) -> None: ...


def train_round(
    resident: Slot | Worker, start: StateRef, plan: TryCandidates, on_step: OnStep = ignore
) -> list[Any]:
    """Train every candidate whole, on slot 0 or this worker; return the replies with a result."""
    waves = [{0: candidate} for candidate in plan.candidates]
    replies = [resident.handle(Pretrain(start, plan, wave), on_step) for wave in waves]
    return [reply for reply in replies if reply is not None]
