"""Workers in threads, the real clock and shards: without staleness the result is that of one
process that takes each step at once; with it, every micro-batch counts once.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from raytrain_opt import Job
from raytrain_opt.async_training.buffer_pooling import advance_buffers
from raytrain_opt.async_training.scheduler import EpochPhase
from raytrain_opt.async_training.weight_shard import assemble_state, split_parameters
from raytrain_opt.async_training.worker_loop import AsyncTrainer
from raytrain_opt.data import load_shared_data
from raytrain_opt.data.in_memory_sets import DatasetArrays
from raytrain_opt.errors import JobError
from raytrain_opt.results import AsyncWorkerMetrics
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches
from raytrain_opt.train.state import TrainingState
from tests.support.local_server import LocalClient, LocalServer, open_shards

WORKERS = 3
LRS = (0.1, 0.1, 0.05, 0.05, 0.02)
CPU = torch.device("cpu")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"name": "SGD", "args": {"momentum": 0.9, "weight_decay": 1e-2}},
    "LARS": {"name": "LARS", "args": {"momentum": 0.9, "weight_decay": 1e-2}},
    # With the default eps, rounding errors of a gradient near zero would become full updates.
    "AdamW": {"name": "AdamW", "args": {"eps": 0.1}},
}


@pytest.fixture(scope="module")
def digits() -> DatasetArrays:
    shared = load_shared_data(job().data)
    assert shared is not None
    return shared


def job(**changes: Any) -> Job:
    values = {
        # Not 4: oneDNN of torch 2.15 writes beyond its buffers in the backward pass of a 1x1
        # convolution with 4 input channels and stride 2 (channels_last, one thread, AVX2).
        "model": {"name": "resnet8", "args": {"width": 8}},
        "data": "digits",
        "epochs": 2,
        "global_batch_size": 48,
        "optimizer": "SGD",
        "average": None,
        "workers": {"count": WORKERS},
    }
    return Job.model_validate(values | changes)


def asynchronous(
    job: Job,
    digits: DatasetArrays | None,
    state: TrainingState,
    bound: int | None,
    *,
    shards: int = 2,
    decay: float = 1.0,
    first_step: int = 0,
    in_order: bool = True,
) -> tuple[TrainingState, LocalServer, list[AsyncWorkerMetrics]]:
    """Train one phase; each worker is a thread with its own learner."""
    learners = [Learner(LearnerConfig.from_job(job), digits, CPU) for _ in range(WORKERS)]
    phase = EpochPhase(
        "1.x",
        1,
        first_step,
        LRS,
        WORKERS,
        bound,
        in_order=in_order and bound == 0,
        weight_decay_factor=decay,
    )
    wire = torch.bfloat16 if job.parallel.compression == "bf16" else torch.float32
    shard_list = open_shards(job, learners[0].info, shards)
    server = LocalServer.for_phase(phase, shard_list, state, wire=wire)

    done: dict[int, AsyncWorkerMetrics] = {}

    def work(worker: int) -> None:
        trainer = AsyncTrainer(learners[worker], shards)
        trainer.load(state)
        done[worker] = trainer.train(phase, LocalClient(server, worker), lambda _: None)

    for learner in learners:
        # Loader processes begin here, while no other thread runs: torch's seeding holds a lock
        # for a moment, and a process forked in that moment would wait for it forever. In a run
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
    buffers = advance_buffers(state, [report.buffers for report in reports], len(LRS))
    return assemble_state(state, [shard.state() for shard in shard_list], buffers), server, reports


def trained_learner(job: Job, digits: DatasetArrays) -> tuple[Learner, TrainingState]:
    """Return a learner in the middle of a training, so that the optimizer has a state."""
    learner = Learner(LearnerConfig.from_job(job), digits, CPU)
    learner.train(1, 0, [0.1, 0.1], MicroBatches(range(WORKERS), WORKERS))
    return learner, learner.state(copy=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shards", [1, 3])
def test_without_staleness_it_is_the_synchronous_training(
    digits: DatasetArrays, name: str, shards: int
) -> None:
    async_job = job(optimizer=OPTIMIZERS[name])
    learner, state = trained_learner(async_job, digits)
    final_state, server, _ = asynchronous(
        async_job, digits, state, 0, shards=shards, decay=0.5, first_step=2
    )
    learner.load(state)
    learner.train(1, 2, LRS, MicroBatches(range(WORKERS), WORKERS), weight_decay_factor=0.5)
    expected = learner.state(copy=True)
    assert final_state.tensors.keys() == expected.tensors.keys()
    for key, tensor in expected.tensors.items():
        if "running" not in key and "num_batches" not in key:
            torch.testing.assert_close(
                final_state.tensors[key].tensor(), tensor.tensor(), rtol=2e-4, atol=2e-5
            )
    assert server.scheduler.staleness.counts == (len(LRS) * WORKERS,)
    learner.load(final_state)  # synchronous training continues from it
    learner.train(1, 7, [0.01], MicroBatches(range(WORKERS), WORKERS))


def test_a_state_that_went_through_the_shards_is_the_same(digits: DatasetArrays) -> None:
    async_job = job()
    learner, state = trained_learner(async_job, digits)
    shards = open_shards(async_job, learner.info, 2)
    for shard in shards:
        shard.load(state)
    assert (
        assemble_state(state, [shard.state() for shard in shards], {}).digest() == state.digest()
    )


@pytest.mark.parametrize("bound", [1, 4, None])
@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_with_staleness_every_micro_batch_counts_once(
    digits: DatasetArrays, bound: int | None, compression: str
) -> None:
    async_job = job(parallel={"mode": "async", "compression": compression})
    _, state = trained_learner(async_job, digits)
    final_state, server, reports = asynchronous(async_job, digits, state, bound)
    numbers = [number for update in server.updates for number, _ in update.weights]
    assert sorted(numbers) == list(range(len(LRS) * WORKERS))
    assert server.scheduler.totals.samples == len(LRS) * 48
    assert sum(report.micro_batches for report in reports) == len(numbers)
    assert sum(server.scheduler.staleness.counts) == len(numbers)
    assert bound is None or len(server.scheduler.staleness.counts) <= bound + 1
    assert [shard.lost for shard in server.shards] == [0, 0]
    for name, tensor in state.tensors.items():
        if name.endswith("num_batches_tracked"):
            assert int(final_state.tensors[name].tensor()) == int(tensor.tensor()) + len(LRS)
    for tensor in final_state.tensors.values():
        assert torch.isfinite(tensor.tensor().double()).all()


def make_random_datasets() -> tuple[TensorDataset, TensorDataset]:
    """A user's function: images like digits."""
    x = torch.rand(320, 1, 8, 8)
    return TensorDataset(x, torch.arange(320) % 10), TensorDataset(x[:9], torch.arange(9))


@pytest.mark.parametrize("bound", [0, 2])
def test_loader_processes_claim_ahead_and_no_worker_waits_forever(bound: int) -> None:
    data = {
        "name": make_random_datasets,
        "num_classes": 10,
        "normalize": "none",
        "loader_workers": 2,
    }
    async_job = job(data=data)
    state = Learner(LearnerConfig.from_job(async_job), None, CPU).state(copy=True)
    _, server, _ = asynchronous(async_job, None, state, bound, in_order=False)
    numbers = [number for update in server.updates for number, _ in update.weights]
    assert sorted(numbers) == list(range(len(LRS) * WORKERS))
    assert len(server.scheduler.staleness.counts) <= bound + 1


def test_it_learns(digits: DatasetArrays) -> None:
    async_job = job(model={"name": "small_cnn", "args": {"width": 8}})
    learner, state = trained_learner(async_job, digits)
    before = learner.evaluate("test").loss
    final_state, _, _ = asynchronous(async_job, digits, state, None)
    learner.load(final_state)
    assert learner.evaluate("test").loss < before


def test_a_worker_that_stops_does_not_stop_the_others(digits: DatasetArrays) -> None:
    async_job = job()
    learner, state = trained_learner(async_job, digits)
    learners = [learner, Learner(LearnerConfig.from_job(async_job), digits, CPU)]
    phase = EpochPhase("1.x", 1, 0, LRS, WORKERS, 2)
    server = LocalServer.for_phase(phase, open_shards(async_job, learner.info, 1), state)
    trainers = [AsyncTrainer(trainer_learner, 1) for trainer_learner in learners]

    class Died(Exception):  # noqa: N818
        pass

    def dies(count: int) -> None:
        if count == 2:
            raise Died

    trainers[0].load(state)
    with pytest.raises(Died):
        trainers[0].train(phase, LocalClient(server, 0), dies)
    with server.changed:
        server.make(server.scheduler.leave(0))
    trainers[1].load(state)
    report = trainers[1].train(phase, LocalClient(server, 1), lambda _: None)
    numbers = [number for update in server.updates for number, _ in update.weights]
    assert sorted(n % phase.size for n in numbers) == list(range(len(LRS) * WORKERS))
    assert report.micro_batches == len(numbers) - 2
    assert threading.active_count() < 20


def test_parts_are_complete_tensors_of_about_equal_size() -> None:
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


def test_an_update_is_made_once_and_lost_gradients_are_counted(digits: DatasetArrays) -> None:
    async_job = job()
    learner, state = trained_learner(async_job, digits)
    phase = EpochPhase("1.x", 1, 0, LRS, 1, None)
    server = LocalServer.for_phase(phase, open_shards(async_job, learner.info, 1), state)
    trainer, client, shard = AsyncTrainer(learner, 1), LocalClient(server, 0), server.shards[0]
    trainer.load(state)
    trainer.train(phase, client, lambda _: None)
    before = shard.state().digest()
    shard.apply(server.updates[-1])
    assert shard.state().digest() == before
    shard.load(state, version=3)  # as one that died and came back
    shard.apply(server.updates[3])
    assert (shard.version, shard.lost) == (4, 1)
