"""Workers decide as a slot does, and continue a training that was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from raytrain_opt.config.schema import Job
from raytrain_opt.data import load_shared_data
from raytrain_opt.optim.epoch_steps import epoch_steps, length_of
from raytrain_opt.pools.commands import MainTrain, Pretrain, SendCandidateState, StateRef
from raytrain_opt.pools.in_process import InProcessStates
from raytrain_opt.pools.worker import Slot, Worker
from raytrain_opt.results import Steps
from raytrain_opt.search.factory import build_policy
from raytrain_opt.search.policy import Candidate, History, TryCandidates
from raytrain_opt.train.data_parallel import DataParallel, Parallel
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.state import TrainingState
from tests.multiprocess.test_data_parallel import plain_net
from tests.support.process_group import Results, run_ranks
from tests.support.rounds import ignore, train_round

WORKERS, BATCH, STEPS = 4, 64, 6
OTHER_WEIGHTS: dict[str, dict[str, Any]] = {
    "plain": {"average": None},
    "schedule-free": {
        "optimizer": "ScheduleFreeSGD",
        "learning_rate": {"policy": "schedule", "shape": "constant"},
    },
}
LRS = (0.1, 0.2, 1e-4, 1e-5)  # the second is the best


def make_job(model: Any, **sections: Any) -> Job:
    return Job.model_validate(
        {
            "model": model,
            "data": "digits",
            "epochs": 8,
            "global_batch_size": BATCH,
            "learning_rate": {"policy": "stpt_horizon", "max_search_cost": 1.0},
            "optimizer": {"name": "auto", "candidates": ["SGD", "LARS"]},
            "workers": {"count": WORKERS},
            **sections,
        }
    )


class CountedStates(InProcessStates):
    """States in this process, and how often one was read."""

    reads = 0

    def get(self, ref: StateRef) -> TrainingState:
        self.reads += 1
        return super().get(ref)


def search(trainer: Slot | Worker, states: CountedStates, job: Job) -> dict[str, Any]:
    """Let the policy search; rank 0 tells the others what it decides, as the driver does."""
    info = trainer.learner.info
    steps = epoch_steps(info.train_size, BATCH, job.batch_ramp)
    policy, history = build_policy(job, length_of(job), steps), History()
    start = states.put("initial", trainer.learner.state(copy=True))
    tried: list[Any] = []
    while isinstance(action := policy.next(1, history), TryCandidates):
        results = [train_round(trainer, start, action)]
        if dist.is_initialized():
            dist.broadcast_object_list(results, src=0)
        for result in results[0]:
            loss = result.val_loss if result.status == "ok" else result.train_loss
            tried.append((result.status, result.candidate.optimizer, result.candidate.lr, loss))
        history = history.after_round(policy.decide(action, results[0], history))
    latest = history.latest
    assert latest is not None
    return {"tried": tried, "optimizer": latest.next_optimizer, "peak": latest.next_base_lr}


def one_round(trainer: Slot | Worker, states: CountedStates, _job: Job) -> dict[str, Any]:
    """Train a round of policy stpt and take over the state of the second candidate."""
    start = states.put("start", trainer.learner.state(copy=True))
    candidates = tuple(Candidate(i, 1.0, lr) for i, lr in enumerate(LRS))
    plan = TryCandidates(1, 0.1, candidates, (1.0,) * STEPS, keeps_winner=True)
    results = train_round(trainer, start, plan)
    send = SendCandidateState(Pretrain(start, plan, {}), candidates[1], 0)
    sent = trainer.handle(send, ignore)
    outcome = {
        "losses": [result.val_loss for result in results],
        "sent": None if sent is None else states.get(sent).digest(),
        "digest": trainer.learner.state(copy=True).digest(),
    }
    if isinstance(trainer, Worker):
        # What was sent has an id that every worker knows: no worker loads it again.
        live = states.put("1.candidate1", trainer.learner.state(copy=True))
        reads = states.reads
        trainer.handle(MainTrain(live, 1, Steps(STEPS, (0.1,) * 2)), ignore)
        outcome["reads"] = states.reads - reads
        restarted = Worker(
            trainer.learner, trainer.index, trainer.world_size, states
        )  # it knows nothing of the round
        restarted.handle(send, ignore)
        outcome["digest_after_restart"] = trainer.learner.state(copy=True).digest()
    return outcome


def stopped_epoch(worker: Worker, states: CountedStates) -> dict[str, Any]:
    """Train some steps at once, and stopped in between; return both states and totals."""
    start = states.put("start", worker.learner.state(copy=True))
    lrs, outcomes = tuple(0.1 / step for step in range(1, STEPS + 1)), []
    # In its first steps DDP rebuilds its buckets, and four ranks sum in another order then.
    for stops in (STEPS, STEPS, 2):
        worker.forget_state()
        assert worker.handle(MainTrain(start, 1, Steps(0, lrs), 1, sends=False), ignore) is None
        first = worker.handle(MainTrain(start, 1, Steps(0, lrs), stops), ignore)
        totals, steps = first.totals, first.totals.steps
        if steps < STEPS:
            state = states.put("stopped", worker.learner.state(copy=True))
            worker.forget_state()  # as a process that was started anew
            rest = worker.handle(MainTrain(state, 1, Steps(steps, lrs[steps:])), ignore)
            totals = totals.plus(rest.totals)
        digest = worker.learner.state(copy=True).digest()
        outcomes.append((digest, totals.steps, totals.samples, totals.losses))
    return {"stopped_after": steps, "at_once": outcomes[1], "stopped": outcomes[2]}


def run_rank(rank: int, world_size: int, folder: Path) -> Results:
    results: dict[str, Any] = {"worker": {}, "slot": {}}
    connect = DataParallel if world_size > 1 else Parallel
    for model, work in ((plain_net, search), ("small_cnn", one_round)):
        job, states = make_job(model), CountedStates()
        config, cpu = LearnerConfig.from_job(job), torch.device("cpu")
        arrays = load_shared_data(job.data)
        learner = Learner(config, arrays, cpu, connect)
        worker = Worker(learner, rank, world_size, states)
        results["worker"] |= work(worker, states, job)
        if work is one_round:
            results["worker"]["averaged"] = stopped_epoch(worker, states)
            for name, sections in OTHER_WEIGHTS.items():
                other_config = LearnerConfig.from_job(make_job(model, **sections))
                other = Learner(other_config, arrays, cpu, connect)
                other_worker = Worker(other, rank, world_size, states)
                results["worker"][name] = stopped_epoch(other_worker, states)
        if world_size == 1:
            slot = Slot(Learner(config, arrays, cpu), 0, states, "global")
            results["slot"] |= work(slot, states, job)
    return results


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Results]]:
    """Return the results of each rank by size of the group."""
    module, folder = run_rank, tmp_path_factory.mktemp("candidates")
    return {size: run_ranks(module, size, folder / str(size)) for size in (1, 2, 4)}


def test_one_worker_computes_what_a_slot_computes(groups: dict[int, list[Results]]) -> None:
    [results] = groups[1]
    for name, expected in results["slot"].items():
        assert results["worker"][name] == expected


@pytest.mark.parametrize("size", [2, 4])
def test_several_workers_decide_as_a_slot(groups: dict[int, list[Results]], size: int) -> None:
    expected = groups[1][0]["slot"]
    first, *others = (results["worker"] for results in groups[size])
    assert [t[:3] for t in first["tried"]] == [t[:3] for t in expected["tried"]]
    losses = [[loss for *_, loss in r["tried"]] for r in (first, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert first["optimizer"] == expected["optimizer"]
    assert first["peak"] == pytest.approx(expected["peak"], rel=1e-4)
    assert [r["losses"] for r in others] == [[]] * (size - 1)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_candidates_have_the_order_of_those_on_a_slot(
    groups: dict[int, list[Results]], size: int
) -> None:
    """Averages of BatchNorm differ: workers pool theirs, a slot updates them more often."""
    losses = groups[size][0]["worker"]["losses"]
    expected = groups[1][0]["slot"]["losses"]
    assert losses == pytest.approx(expected, rel=0.1)
    assert np.argsort(losses).tolist() == np.argsort(expected).tolist()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_workers_continue_from_the_candidate_without_loading_it(
    groups: dict[int, list[Results]], size: int
) -> None:
    results = [rank["worker"] for rank in groups[size]]
    assert len({result["digest"] for result in results}) == 1
    assert [result["sent"] for result in results] == [results[0]["digest"]] + [None] * (size - 1)
    assert [result["reads"] for result in results] == [0] * size


@pytest.mark.parametrize("size", [1, 2, 4])
def test_restarted_workers_train_the_candidate_again(
    groups: dict[int, list[Results]], size: int
) -> None:
    for rank in groups[size]:
        assert rank["worker"]["digest_after_restart"] == rank["worker"]["digest"]


@pytest.mark.parametrize("weights", ["averaged", "plain", "schedule-free"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_workers_that_are_stopped_within_an_epoch_continue_bit_for_bit(
    groups: dict[int, list[Results]], size: int, weights: str
) -> None:
    """BatchNorm's statistics are computed anew for averaged weights."""
    for rank in groups[size]:
        epoch = rank["worker"][weights]
        assert epoch["stopped_after"] == 2
        assert epoch["stopped"] == epoch["at_once"]
