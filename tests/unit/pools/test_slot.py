"""What a slot computes of each global batch, against a learner's steps; and its probes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raytrain_opt.config.batch_size import ThroughputKneeSearch
from raytrain_opt.config.learning_rate import CandidateBatch
from raytrain_opt.data import load_shared_data
from raytrain_opt.pools.commands import Pretrain, ProbeBatchSize, SendCandidateState
from raytrain_opt.pools.in_process import InProcessStates
from raytrain_opt.pools.worker import Slot
from raytrain_opt.results import Steps
from raytrain_opt.search.policy import Candidate, TryCandidates
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches
from tests.support.rounds import ignore, train_round
from tests.support.small_jobs import small_job

WORKERS, STEPS, LR = 4, 3, 0.1


def open_learner(folder: Path) -> Learner:
    job = small_job(folder, workers={"count": WORKERS, "threads": 1})
    config = LearnerConfig.from_job(job)
    return Learner(config, load_shared_data(job.data), torch.device("cpu"))


@pytest.mark.parametrize(
    ("candidate_batch", "indices", "lr"),
    [
        ("global", range(WORKERS), LR),
        ("local", range(1), LR / WORKERS),
        (None, range(WORKERS), LR),  # a policy without this setting
    ],
)
def test_a_local_candidate_trains_one_micro_batch_at_the_rate_that_belongs_to_it(
    tmp_path: Path, candidate_batch: CandidateBatch | None, indices: range, lr: float
) -> None:
    expected, states = open_learner(tmp_path), InProcessStates()
    start = states.put("start", expected.state(copy=True))
    totals = expected.train(1, Steps(0, (lr,) * STEPS), MicroBatches(indices, WORKERS))

    slot = Slot(open_learner(tmp_path), 0, states, candidate_batch)
    candidate = Candidate(0, 1.0, LR)
    plan = TryCandidates(1, LR, (candidate,), (1.0,) * STEPS, keeps_winner=True)
    (result,) = train_round(slot, start, plan)
    ref = slot.handle(SendCandidateState(Pretrain(start, plan, {}), candidate, 0), ignore)

    assert result.candidate.lr == LR
    assert totals.samples == STEPS * 64 * len(indices) // WORKERS
    assert states.get(ref).digest() == expected.state(copy=True).digest()


def test_a_winner_that_another_slot_trains_again_reports_its_progress(tmp_path: Path) -> None:
    """Else a slot would count as silent, and not leave when the run ends."""
    states, progress = InProcessStates(), list[tuple[int, int]]()
    slot = Slot(open_learner(tmp_path), 1, states, None)
    start = states.put("start", slot.learner.state(copy=True))
    candidate = Candidate(0, 1.0, LR)
    plan = TryCandidates(1, LR, (candidate,), (1.0,) * STEPS, keeps_winner=True)
    command = SendCandidateState(Pretrain(start, plan, {}), candidate, 1)
    slot.handle(command, lambda done, total: progress.append((done, total)))
    assert progress == [(done, STEPS) for done in range(STEPS)]


def test_a_slot_measures_a_batch_size_and_leaves_no_trace(tmp_path: Path) -> None:
    slot = Slot(open_learner(tmp_path), 0, InProcessStates(), None)
    section = ThroughputKneeSearch(strategy="throughput_knee", max_probe_s=0.05)
    before = slot.learner.state(copy=True).digest()
    for check, factor in ((False, 1), (True, 3)):
        probe = slot.handle(ProbeBatchSize(section, 8, check), lambda _done, _total: None)
        assert (probe.batch_size, probe.status) == (8, "ok")
        assert probe.steps >= factor * 5 or probe.duration_s >= factor * section.max_probe_s
    assert slot.learner.state(copy=True).digest() == before
