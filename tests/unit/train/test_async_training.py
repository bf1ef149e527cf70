"""Workers in threads, the real clock and shards: without staleness the result is that of one
process that takes each step as a whole; with it, every share counts once.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from local_server import LocalServer, Member, open_shards
from torch import nn
from torch.utils.data import TensorDataset

from raytrain_opt import Job
from raytrain_opt.data import load_shared
from raytrain_opt.data.array_sets import Arrays
from raytrain_opt.errors import JobError
from raytrain_opt.train.async_trainer import AsyncTrainer
from raytrain_opt.train.buffers import moved_on
from raytrain_opt.train.learner import Learner, Shares
from raytrain_opt.train.parameter_server import joined, split_parameters
from raytrain_opt.train.share_clock import Phase
from raytrain_opt.train.state import HostState
from raytrain_opt.train.totals import Report

WORKERS = 3
LRS = (0.1, 0.1, 0.05, 0.05, 0.02)
CPU = torch.device("cpu")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"name": "SGD", "args": {"momentum": 0.9, "weight_decay": 1e-2}},
    "LARS": {"name": "LARS", "args": {"momentum": 0.9, "weight_decay": 1e-2}},
    # A gradient near zero is divided by itself but for eps: rounding would be all that it is.
    "AdamW": {"name": "AdamW", "args": {"eps": 0.1}},
}


@pytest.fixture(scope="module")
def digits() -> Arrays:
    shared = load_shared(job().data)
    assert shared is not None
    return shared


def job(**changes: Any) -> Job:
    values = {
        "model": {"name": "resnet8", "args": {"width": 4}},
        "data": "digits",
        "epochs": 2,
        "global_batch_size": 48,
        "workers": {"count": WORKERS},
    }
    return Job.model_validate(values | changes)


def asynchronous(
    job: Job,
    digits: Arrays | None,
    state: HostState,
    bound: int | None,
    *,
    shards: int = 2,
    decay: float = 1.0,
    first_step: int = 0,
    in_order: bool = True,
) -> tuple[HostState, LocalServer, list[Report]]:
    """One phase; each worker is a thread with a learner of its own."""
    learners = [Learner(job, digits, CPU) for _ in range(WORKERS)]
    phase = Phase(
        "1.x", 1, first_step, LRS, WORKERS, bound, in_order=in_order and bound == 0, decay=decay
    )
    wire = torch.bfloat16 if job.parallel.compression == "bf16" else torch.float32
    shard_list = open_shards(job, learners[0].info, shards)
    server = LocalServer.begun(phase, shard_list, state, wire=wire)

    done: dict[int, Report] = {}

    def work(worker: int) -> None:
        trainer = AsyncTrainer(learners[worker], shards)
        trainer.load(state)
        done[worker] = trainer.train(phase, Member(server, worker), lambda _: None)

    for learner in learners:
        # Loader processes begin here, while no other thread runs: torch's seeding holds a lock
        # for a moment, and a process forked in that moment would wait for it for ever. In a run
        # a process has one learner.
        learner.evaluate("test")
    # Not of an executor: a process forked from one of its threads ends with code 1, because it
    # waits for that thread, which is then its own.
    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reports = [done[worker] for worker in range(WORKERS)]  # a missing one: its thread failed
    for learner in learners:
        learner.close()
    buffers = moved_on(state, [report.buffers for report in reports], len(LRS))
    return joined(state, [shard.state() for shard in shard_list], buffers), server, reports


def begun(job: Job, digits: Arrays) -> tuple[Learner, HostState]:
    """In the middle of a training: the optimiser has a state."""
    learner = Learner(job, digits, CPU)
    learner.train(1, 0, [0.1, 0.1], Shares(range(WORKERS), WORKERS))
    return learner, learner.state(copy=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shards", [1, 3])
def test_without_staleness_it_is_the_synchronous_training(
    digits: Arrays, name: str, shards: int
) -> None:
    given = job(optimizer=OPTIMIZERS[name])
    learner, state = begun(given, digits)
    found, server, _ = asynchronous(
        given, digits, state, 0, shards=shards, decay=0.5, first_step=2
    )
    learner.load(state)
    learner.train(1, 2, LRS, Shares(range(WORKERS), WORKERS), decay=0.5)
    expected = learner.state(copy=True)
    assert found.tensors.keys() == expected.tensors.keys()
    for key, tensor in expected.tensors.items():
        if "running" not in key and "num_batches" not in key:
            torch.testing.assert_close(
                found.tensors[key].tensor(), tensor.tensor(), rtol=2e-4, atol=2e-5
            )
    assert server.clock.staleness.counts == (len(LRS) * WORKERS,)
    learner.load(found)  # it can go on from there, together
    learner.train(1, 7, [0.01], Shares(range(WORKERS), WORKERS))


def test_a_state_that_went_through_the_shards_is_the_same(digits: Arrays) -> None:
    given = job()
    learner, state = begun(given, digits)
    shards = open_shards(given, learner.info, 2)
    for shard in shards:
        shard.load(state)
    assert joined(state, [shard.state() for shard in shards], {}).digest() == state.digest()


@pytest.mark.parametrize("bound", [1, 4, None])
@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_with_staleness_every_share_counts_once(
    digits: Arrays, bound: int | None, compression: str
) -> None:
    given = job(parallel={"mode": "async", "compression": compression})
    _, state = begun(given, digits)
    found, server, reports = asynchronous(given, digits, state, bound)
    shares = [number for update in server.updates for number, _ in update.weights]
    assert sorted(shares) == list(range(len(LRS) * WORKERS))
    assert server.clock.totals.samples == len(LRS) * 48
    assert sum(report.shares for report in reports) == len(shares)
    assert sum(server.clock.staleness.counts) == len(shares)
    assert bound is None or len(server.clock.staleness.counts) <= bound + 1
    assert [shard.lost for shard in server.shards] == [0, 0]
    for name, tensor in state.tensors.items():
        if name.endswith("num_batches_tracked"):
            assert int(found.tensors[name].tensor()) == int(tensor.tensor()) + len(LRS)
    for tensor in found.tensors.values():
        assert torch.isfinite(tensor.tensor().double()).all()


def made_up() -> tuple[TensorDataset, TensorDataset]:
    """A user's function: images like digits."""
    x = torch.rand(320, 1, 8, 8)
    return TensorDataset(x, torch.arange(320) % 10), TensorDataset(x[:9], torch.arange(9))


@pytest.mark.parametrize("bound", [0, 2])
def test_loader_processes_claim_ahead_and_nobody_waits_for_ever(bound: int) -> None:
    data = {"name": made_up, "num_classes": 10, "normalize": "none", "loader_workers": 2}
    given = job(data=data)
    state = Learner(given, None, CPU).state(copy=True)
    _, server, _ = asynchronous(given, None, state, bound, in_order=False)
    shares = [number for update in server.updates for number, _ in update.weights]
    assert sorted(shares) == list(range(len(LRS) * WORKERS))
    assert len(server.clock.staleness.counts) <= bound + 1


def test_it_learns(digits: Arrays) -> None:
    given = job(model={"name": "small_cnn", "args": {"width": 8}})
    learner, state = begun(given, digits)
    before = learner.evaluate("test").loss
    found, _, _ = asynchronous(given, digits, state, None)
    learner.load(found)
    assert learner.evaluate("test").loss < before


def test_a_worker_that_stops_does_not_stop_the_others(digits: Arrays) -> None:
    given = job()
    learner, state = begun(given, digits)
    learners = [learner, Learner(given, digits, CPU)]
    phase = Phase("1.x", 1, 0, LRS, WORKERS, 2)
    server = LocalServer.begun(phase, open_shards(given, learner.info, 1), state)
    trainers = [AsyncTrainer(each, 1) for each in learners]

    class Died(Exception):  # noqa: N818
        pass

    def dies(shares: int) -> None:
        if shares == 2:
            raise Died

    trainers[0].load(state)
    with pytest.raises(Died):
        trainers[0].train(phase, Member(server, 0), dies)
    with server.changed:
        server.make(server.clock.leave(0))
    trainers[1].load(state)
    report = trainers[1].train(phase, Member(server, 1), lambda _: None)
    shares = [number for update in server.updates for number, _ in update.weights]
    assert sorted(shares) == list(range(len(LRS) * WORKERS))
    assert report.shares == len(shares) - 2
    assert threading.active_count() < 20


def test_parts_are_whole_tensors_of_about_as_many_bytes() -> None:
    model = nn.Sequential(*[nn.Linear(n, 10) for n in (100, 30, 30, 30, 10)])
    parts = split_parameters(model, 2)
    assert sorted(id(p) for part in parts for p in part) == sorted(
        id(p) for p in model.parameters()
    )
    sizes = [sum(p.numel() for p in part) for part in parts]
    assert abs(sizes[0] - sizes[1]) <= 20
    assert [len(part) for part in split_parameters(nn.Linear(2, 2), 3)] == [1, 1, 0]


def test_weights_of_two_types_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(JobError, match=r"parallel.mode: .*float32 and float64"):
        split_parameters(model, 1)


def test_an_update_is_made_once_and_lost_gradients_are_counted(digits: Arrays) -> None:
    given = job()
    learner, state = begun(given, digits)
    phase = Phase("1.x", 1, 0, LRS, 1, None)
    server = LocalServer.begun(phase, open_shards(given, learner.info, 1), state)
    trainer, member, shard = AsyncTrainer(learner, 1), Member(server, 0), server.shards[0]
    trainer.load(state)
    trainer.train(phase, member, lambda _: None)
    before = shard.state().digest()
    shard.apply(server.updates[-1])
    assert shard.state().digest() == before
    shard.load(state, version=3)  # as one that died and came back
    shard.apply(server.updates[3])
    assert (shard.version, shard.lost) == (4, 1)
