"""A round from the driver's side, with slots that only count steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from raytrain_opt.errors import PoolError
from raytrain_opt.pools.commands import CandidatePart, Pretrain, StateRef
from raytrain_opt.pools.rounds import CandidateTraining, RoundProgress
from raytrain_opt.results import EvalTotals, TrainTotals
from raytrain_opt.search.policy import Candidate, CandidateResult, TryCandidates

START = StateRef("start", None)
STEPS = 100


def totals(steps: int) -> TrainTotals:
    return TrainTotals(steps, steps, (1.0,) * steps, 0, 0.0, 0.0)


@dataclass
class CountingSlots:
    """Slots whose candidates train `until` steps of those that are left."""

    size: int
    lost: set[int] = field(default_factory=set)

    def alive(self) -> tuple[int, ...]:
        return tuple(slot for slot in range(self.size) if slot not in self.lost)

    def command(self, command: Pretrain, _: Any = None) -> dict[int, Any]:
        if not command.sends:
            return dict.fromkeys(command.wave)
        return {slot: self.reply(command, c) for slot, c in command.wave.items()}

    def reply(self, command: Pretrain, candidate: Candidate) -> CandidatePart | CandidateResult:
        part, left = command.parts.get(candidate.index), command.left(candidate)
        done, trained = STEPS - left, min(command.end, left)
        if trained < left:
            state = StateRef(f"{candidate.index}.{done + trained}", None)
            return CandidatePart(totals(done + trained), state)
        whole = totals(trained) if part is None else part.totals.plus(totals(trained))
        scored = EvalTotals(1, {"loss": candidate.lr, "accuracy": 1.0}, 0.0)
        return CandidateResult.of(candidate, whole, scored, 0)


def a_round(candidates: int) -> RoundProgress:
    all_of_them = tuple(Candidate(i, 1.0, 0.1 * (i + 1)) for i in range(candidates))
    return RoundProgress(TryCandidates(1, 0.1, all_of_them, (1.0,) * STEPS))


@pytest.mark.parametrize(("slots", "candidates"), [(4, 5), (4, 1), (1, 3), (2, 2)])
def test_an_interval_counts_the_steps_of_one_candidate(slots: int, candidates: int) -> None:
    """However many slots have nothing to train: else nothing would be saved."""
    pool: Any = CountingSlots(slots)
    training, progress = CandidateTraining(pool, together=False), a_round(candidates)
    steps = []
    while progress.left:
        before = progress
        progress = training.train(START, before, until=10)
        steps.append(progress.steps_since(before))
        parts = {index: f"{index}.{t.steps}" for index, t in progress.totals.items()}
        assert {index: ref.id for index, ref in progress.states.items()} == parts
    assert steps == [10] * (STEPS // 10 * -(-candidates // slots))
    assert [r.candidate.index for r in progress.results] == list(range(candidates))
    assert all(result.samples == STEPS for result in progress.results)


def test_other_slots_continue_a_round_that_was_interrupted() -> None:
    wide: Any = CountingSlots(3)
    progress = CandidateTraining(wide, together=False).train(START, a_round(4), until=30)
    narrow: Any = CountingSlots(2)
    training = CandidateTraining(narrow, together=False)
    while progress.left:
        progress = training.train(START, progress, until=50)
    assert [(r.candidate.index, r.samples) for r in progress.results] == [
        (index, STEPS) for index in range(4)
    ]


def test_a_round_without_slots_says_so() -> None:
    pool: Any = CountingSlots(1, lost={0})
    with pytest.raises(PoolError, match="epoch 1: every slot died more often than max_restarts"):
        CandidateTraining(pool, together=False).train(START, a_round(1))
