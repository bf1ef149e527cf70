"""The values that policies, driver and slots exchange."""

from __future__ import annotations

from dataclasses import replace

from raytrain_opt.search.policy import (
    Candidate,
    CandidateResult,
    Decision,
    EpochLosses,
    History,
    TryCandidates,
)

UNDECIDED = Decision(1, 0.1, (), None, 0.1, "")
DECIDED = replace(UNDECIDED, winner=CandidateResult.lost(Candidate(0, 1.0, 0.1)))


def test_a_history_grows_by_rounds_and_epochs_and_never_changes() -> None:
    empty = History()
    history = empty.after_round(UNDECIDED).after_round(DECIDED).after_epoch(EpochLosses(0.5))
    assert (empty.decisions, empty.epoch_losses, empty.latest) == ((), (), None)
    assert (history.decisions, history.epoch_losses) == ((UNDECIDED, DECIDED), (0.5,))
    assert history.latest == DECIDED
    scored = history.after_epoch(EpochLosses(0.4, 0.6))
    assert (scored.epoch_losses, scored.validation_losses) == ((0.5, 0.4), ((2, 0.6),))


def test_an_epoch_is_decided_when_its_last_round_has_a_winner() -> None:
    history = History().after_round(UNDECIDED)
    assert not history.is_decided(1)
    history = history.after_round(DECIDED)
    assert history.is_decided(1)
    assert not history.is_decided(2)
    assert history.rounds_of(1) == (UNDECIDED, DECIDED)
    assert history.rounds_of(2) == ()


def test_a_candidates_rates_are_its_rate_times_the_shape() -> None:
    candidate = Candidate(0, 2.0, 0.2)
    action = TryCandidates(1, 0.1, "", (candidate,), (0.5, 1.0))
    assert candidate.steps(action).lrs == (0.1, 0.2)
    assert action.pretrain_steps == 2
