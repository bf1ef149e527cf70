"""Workers in threads, the real clock and shards: without staleness each gradient is a step of one
process; with it, every micro-batch counts once.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from raytrain_opt import Job
from raytrain_opt.async_training.scheduler import EpochPhase, epoch_phase
from raytrain_opt.async_training.weight_shard import (
    advance_buffers,
    assemble_state,
    convert,
    shard_parameters,
)
from raytrain_opt.async_training.worker_loop import AsyncTrainer
from raytrain_opt.data import load_shared_data
from raytrain_opt.data.in_memory_sets import DatasetArrays
from raytrain_opt.errors import JobError
from raytrain_opt.pools.commands import MainTrain, StateRef
from raytrain_opt.results import AsyncWorkerMetrics, Steps
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
        "parallel": {"micro_batches": WORKERS},
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
    held_out: int = 0,
    workers: int = WORKERS,
) -> tuple[TrainingState, LocalServer, list[AsyncWorkerMetrics]]:
    """Train one phase; each worker is a thread with its own learner."""
    learners = [Learner(LearnerConfig.from_job(job), digits, CPU) for _ in range(workers)]
    steps = Steps(first_step, LRS, weight_decay_factor=decay, held_out=held_out)
    command = MainTrain(StateRef("1", None), 1, steps)
    phase = replace(epoch_phase(learners[0].config, command), bound=bound)
    wire = torch.bfloat16 if job.parallel.compression == "bf16" else torch.float32
    shard_list = open_shards(job, learners[0].info, shards)
    server = LocalServer.for_phase(phase, shard_list, state, wire=wire)

    done: dict[int, AsyncWorkerMetrics] = {}

    def work(worker: int) -> None:
        trainer = AsyncTrainer(learners[worker], shards)
        trainer.load(state)
        done[worker] = trainer.train(phase, LocalClient(server, worker), lambda *_: None)

    for learner in learners:
        # Loader processes begin here, while no other thread runs: torch's seeding holds a lock
        # for a moment, and a process forked in that moment would wait for it forever. In a run
        # a process has one learner.
        learner.evaluate("test")
    # Not of an executor: a process forked from one of its threads ends with code 1, because it
    # waits for that thread, which is then its own.
    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reports = [done[worker] for worker in range(workers)]  # a missing one: its thread failed
    for learner in learners:
        learner.close()
    buffers = advance_buffers(state, [report.buffers for report in reports], len(LRS))
    return assemble_state(state, [shard.state() for shard in shard_list], buffers), server, reports


def trained_learner(job: Job, digits: DatasetArrays) -> tuple[Learner, TrainingState]:
    """Return a learner in the middle of a training, so that the optimizer has a state."""
    learner = Learner(LearnerConfig.from_job(job), digits, CPU)
    learner.train(1, Steps(0, (0.1, 0.1)), MicroBatches(range(WORKERS), WORKERS))
    return learner, learner.state(copy=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shards", [1, 3])
def test_without_staleness_each_gradient_is_a_step_of_synchronous_training(
    digits: DatasetArrays, name: str, shards: int
) -> None:
    """Of a global batch as large as a micro-batch, at the converted rate, of equal samples."""
    async_job = job(optimizer=OPTIMIZERS[name])
    learner, state = trained_learner(async_job, digits)
    final_state, server, _ = asynchronous(
        async_job,
        digits,
        state,
        0,
        shards=shards,
        decay=0.5,
        first_step=2,
        held_out=600,
        workers=1,
    )
    one = {"count": 1}
    small_job = job(optimizer=OPTIMIZERS[name], global_batch_size=16, workers=one, parallel={})
    small = Learner(LearnerConfig.from_job(small_job), digits, CPU)
    small.load(state)
    groups = small.optimizer.param_groups
    converted = [convert(group, WORKERS) for group in groups]
    for group, changes in zip(groups, converted, strict=True):
        group |= {key: value for key, value in changes.items() if key == "lr_multiplier"}
    lrs = [lr for lr in LRS for _ in range(WORKERS)]
    # AdamW's decay is converted, and the learner sets that of each group itself.
    decay = 0.5 * (WORKERS**-0.5 if name == "AdamW" else 1.0)
    whole = MicroBatches(range(1), 1)
    small.train(1, Steps(2 * WORKERS, lrs, weight_decay_factor=decay, held_out=600), whole)
    expected = small.state(copy=True)
    assert final_state.tensors.keys() == expected.tensors.keys()
    for key, tensor in expected.tensors.items():
        if "running" not in key and "num_batches" not in key:
            torch.testing.assert_close(
                final_state.tensors[key].tensor(), tensor.tensor(), rtol=2e-3, atol=2e-4
            )
    assert server.scheduler.staleness.keys() == {0}
    learner.load(final_state)  # synchronous training continues from it, at its own settings
    assert learner.state(copy=True).param_groups == [
        {**group, "lr": saved["lr"]}
        for group, saved in zip(state.param_groups, final_state.param_groups, strict=True)
    ]


@pytest.mark.parametrize("bound", [1, 4, None])
@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_with_staleness_every_micro_batch_counts_once(
    digits: DatasetArrays, bound: int | None, compression: str
) -> None:
    async_job = job(parallel={"micro_batches": WORKERS, "compression": compression})
    _, state = trained_learner(async_job, digits)
    final_state, server, reports = asynchronous(async_job, digits, state, bound)
    numbers = server.pushed
    assert sorted(numbers) == list(range(len(LRS) * WORKERS))
    assert server.scheduler.totals.samples == len(LRS) * 48
    assert sum(report.buffers.batches for report in reports) == len(numbers)
    assert server.scheduler.finished
    assert bound is None or max(server.scheduler.staleness) <= bound
    assert [shard.version for shard in server.shards] == [len(numbers)] * 2
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
    _, server, _ = asynchronous(async_job, None, state, bound)
    numbers = server.pushed
    assert sorted(numbers) == list(range(len(LRS) * WORKERS))
    assert max(server.scheduler.staleness) <= bound


def test_a_worker_that_stops_does_not_stop_the_others(digits: DatasetArrays) -> None:
    threads, async_job = threading.active_count(), job()
    learner, state = trained_learner(async_job, digits)
    learners = [learner, Learner(LearnerConfig.from_job(async_job), digits, CPU)]
    phase = EpochPhase("1.x", 1, Steps(0, LRS), WORKERS, 2)
    server = LocalServer.for_phase(phase, open_shards(async_job, learner.info, 1), state)
    trainers = [AsyncTrainer(trainer_learner, 1) for trainer_learner in learners]

    class Died(Exception):  # noqa: N818
        pass

    def dies(count: int, _total: int) -> None:
        if count == 2:
            raise Died

    trainers[0].load(state)
    with pytest.raises(Died):
        trainers[0].train(phase, LocalClient(server, 0), dies)
    with server.changed:
        server.scheduler.leave(0)
    trainers[1].load(state)
    progress: list[tuple[int, int]] = []
    report = trainers[1].train(phase, LocalClient(server, 1), lambda *p: progress.append(p))
    numbers = server.pushed
    # The fraction is that of the phase, of which the worker that stopped has done a part.
    assert [count for count, _ in progress] == list(range(report.buffers.batches))
    assert [count / total for count, total in progress[1:]] == pytest.approx(
        [min(n / phase.size, 1.0) for n in numbers[3:]], abs=0.1
    )
    assert sorted(numbers) == list(range(len(LRS) * WORKERS))
    assert report.buffers.batches == len(numbers) - 2  # of the one that stopped
    assert threading.active_count() < threads + 20


def test_parts_are_complete_tensors_of_about_equal_size() -> None:
    model = nn.Sequential(*[nn.Linear(n, 10) for n in (100, 30, 30, 30, 10)])
    parts = shard_parameters(model, 2)
    assert sorted(id(p) for part in parts for p in part) == sorted(
        id(p) for p in model.parameters()
    )
    sizes = [sum(p.numel() for p in part) for part in parts]
    assert abs(sizes[0] - sizes[1]) <= 20
    assert [len(part) for part in shard_parameters(nn.Linear(2, 2), 3)] == [1, 1, 0]


def test_weights_of_two_types_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(JobError, match=r"parallel.mode: .*float32 and float64"):
        shard_parameters(model, 1)


def test_of_two_gradients_of_a_micro_batch_the_first_counts(digits: DatasetArrays) -> None:
    """The other may come from a worker that died before it had sent the gradient to all shards."""
    async_job = job()
    learner, state = trained_learner(async_job, digits)
    [shard] = open_shards(async_job, learner.info, 1)
    gradient = torch.ones_like(shard.weights)

    def after(gradients: list[tuple[int, float]]) -> tuple[int, str]:
        shard.load(state, EpochPhase("1.x", 1, Steps(0, LRS), 1, None))
        for number, factor in gradients:
            shard.apply(number, 0, factor * gradient)
        return shard.version, shard.state().digest()

    assert after([(0, 1.0), (0, 2.0), (1, 1.0)]) == after([(0, 1.0), (1, 1.0)])
    assert after([(0, 1.0)])[1] != after([(0, 2.0)])[1]


def test_workers_compute_on_the_weights_that_momentum_will_have_reached(
    digits: DatasetArrays,
) -> None:
    """Gradients of zero until the staleness is known: then the weights move by momentum alone."""
    async_job = job(optimizer={"name": "SGD", "args": {"momentum": 0.9}})
    learner, state = trained_learner(async_job, digits)
    lrs = (0.1,) * 300
    [shard] = open_shards(async_job, learner.info, 1)
    shard.load(state, EpochPhase("1.x", 1, Steps(0, lrs), 1, None))
    gradient = torch.zeros_like(shard.weights)
    for number in range(200):
        shard.apply(number, number - 3, gradient)
    shard.apply(200, 197, gradient + 1)
    expected = shard.weights_ahead()
    for number in range(201, 204):
        shard.apply(number, number - 3, gradient)
    torch.testing.assert_close(shard.weights, expected, rtol=1e-4, atol=1e-5)


def test_each_parameter_is_ahead_by_the_momentum_of_its_own_group(digits: DatasetArrays) -> None:
    """Muon has 0.6, and what is not for Muon follows AdamW, with 0.9."""
    async_job = job(optimizer={"name": "Muon", "args": {"aux": "adamw"}})
    learner, state = trained_learner(async_job, digits)
    [shard] = open_shards(async_job, learner.info, 1)
    shard.load(state, EpochPhase("1.x", 1, Steps(0, LRS), 1, None))
    before = shard.weights.clone()
    shard.apply(0, -60, torch.ones_like(before))  # a running mean of 3 updates
    ahead = shard.weights_ahead() - shard.weights
    change, sizes = shard.weights - before, [p.numel() for p in shard.parameters]
    momentum = {
        parameter: 0.6 if group["use_muon"] else 0.9
        for group in shard.optimizer.param_groups
        for parameter in group["params"]
    }
    assert set(momentum.values()) == {0.6, 0.9}
    parts = zip(change.split(sizes), ahead.split(sizes), strict=True)
    for parameter, (changed, moved) in zip(shard.parameters, parts, strict=True):
        m = momentum[parameter]
        expected = (m + m**2 + m**3) * changed
        torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-6)
