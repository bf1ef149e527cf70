"""A probe: what it measures, with a simulated clock, and that it restores everything."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import raytrain_opt.train.batch_size_probe as probe_module
from raytrain_opt.config.batch_size import GpuUsageMaximizeSearch, ThroughputKneeSearch
from raytrain_opt.data.base import Batch
from raytrain_opt.train import micro_batches
from raytrain_opt.train.batch_size_probe import ProbedTraining, mean_and_error, measure
from raytrain_opt.train.phase import is_out_of_memory
from tests.support.scripted_sampler import ScriptedSampler

CPU = torch.device("cpu")
SECTION = ThroughputKneeSearch(strategy="throughput_knee", max_probe_s=0.2, memory_reserve=0.0)


class Net(nn.Module):
    """Raises `error` when a batch has more than `largest` samples."""

    def __init__(self, largest: int = 1000, error: Exception | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)
        )
        self.largest, self.error = largest, error or torch.OutOfMemoryError("CUDA out of memory")

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.largest:
            raise self.error
        out: Tensor = self.layers(x)
        return out


def batches(size: int, on_copy: Callable[[], None]) -> Iterator[Batch]:
    while True:
        np.random.random()  # a pipeline draws from every generator
        random.random()
        x, y = torch.randn(size, 6), torch.randint(3, (size,))
        on_copy()
        yield Batch(x, y)


def probed(net: Net | None = None, **changes: Any) -> ProbedTraining:
    net = net or Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    training = ProbedTraining(
        net,
        optimizer,
        lambda batch: cross_entropy(net(batch.x), batch.y),
        batches,
        CPU,
        nullcontext,
        scaler,
    )
    for name, value in changes.items():
        setattr(training, name, value)
    return training


def sampler() -> ScriptedSampler:
    return ScriptedSampler([10.0, 90.0] * 500)


def train(training: ProbedTraining, steps: int) -> None:
    for batch, _ in zip(batches(4, lambda: None), range(steps), strict=False):
        training.optimizer.zero_grad()
        training.loss(batch).backward()
        training.optimizer.step()


def everything(training: ProbedTraining) -> list[Any]:
    """Return the complete state of a training as plain values."""
    optimizer = training.optimizer.state_dict()
    buffers = [
        (index, key, value.tolist() if isinstance(value, Tensor) else value)
        for index, values in optimizer["state"].items()
        for key, value in values.items()
    ]
    return [
        {name: tensor.tolist() for name, tensor in training.model.state_dict().items()},
        buffers,
        optimizer["param_groups"],
        [None if p.grad is None else p.grad.tolist() for p in training.model.parameters()],
        [module.training for module in training.model.modules()],
        torch.get_rng_state().tolist(),
        np.random.get_state()[1].tolist(),  # type: ignore[union-attr, index]
        random.getstate(),
    ]


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("train_mode", [True, False])
def test_everything_is_bit_identical_afterwards(steps_before: int, train_mode: bool) -> None:
    training = probed()
    train(training, steps_before)
    training.model.train(train_mode)
    before = everything(training)
    assert measure(training, 8, SECTION, sampler()).status == "ok"
    assert everything(training) == before


def test_times_are_measured_with_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks at 0, 1, 3, 6, 10, 15 | 16, 18, 21, 25, 30 |: parts of 1 to 5 s, 15 s a step."""
    gaps = (part for _ in count() for part in (1.0, 2.0, 3.0, 4.0, 5.0))
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += next(gaps)
        return now

    section = SECTION.model_copy(update={"max_probe_s": 1e6})
    with monkeypatch.context() as patch:
        patch.setattr(micro_batches, "monotonic_s", clock)
        probe = measure(probed(), 30, section, sampler())
    assert sorted(probe.timings_s.values()) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert tuple(probe.timings_s) == micro_batches.STEP_PARTS
    assert sum(probe.timings_s.values()) * probe.steps == probe.duration_s
    assert probe.samples_per_s == 30 / 15


def test_few_slow_steps_that_agree_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks, of_loop = count(0.0, 10.0), count(0.0, 50.0)
    monkeypatch.setattr(micro_batches, "monotonic_s", lambda: next(ticks))
    monkeypatch.setattr(probe_module, "monotonic_s", lambda: next(of_loop))
    section = SECTION.model_copy(update={"max_probe_s": 1e6})
    assert measure(probed(), 8, section, sampler()).steps == 2


def test_a_noisy_probe_takes_more_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    noise, now = np.random.default_rng(0), 0.0

    def clock() -> float:
        nonlocal now
        now += float(noise.uniform(0.5, 1.5))
        return now

    monkeypatch.setattr(micro_batches, "monotonic_s", clock)
    section = SECTION.model_copy(update={"max_probe_s": 1e6})
    probe = measure(probed(), 8, section, sampler())
    assert probe.steps > 20
    assert probe.samples_per_s_error <= 0.02 * probe.samples_per_s


def test_a_slow_probe_ends_at_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count(0.0, 10.0)
    monkeypatch.setattr(micro_batches, "monotonic_s", lambda: next(ticks))
    monkeypatch.setattr(ThroughputKneeSearch, "relative_error", 1e-9)
    section = SECTION.model_copy(update={"max_probe_s": 550.0})
    assert measure(probed(), 8, section, sampler()).steps == 15


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if …"),
        RuntimeError("FIND was unable to find an engine to execute this computation"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling cublasCreate"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_out_of_memory_is_a_result_and_leaves_no_trace(error: Exception) -> None:
    training = probed(Net(largest=16, error=error))
    train(training, 2)
    before = everything(training)
    probe = measure(training, 17, SECTION, sampler())
    assert probe.status == "out_of_memory"
    assert probe.why
    assert everything(training) == before
    assert measure(training, 16, SECTION, sampler()).status == "ok"


def test_other_errors_are_raised_and_leave_no_trace() -> None:
    training = probed(Net(largest=16, error=RuntimeError("shapes do not match")))
    before = everything(training)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        measure(training, 17, SECTION, sampler())
    assert everything(training) == before
    assert not is_out_of_memory(ValueError("out of memory"))


def test_a_size_that_takes_the_reserve_does_not_fit() -> None:
    section = SECTION.model_copy(update={"memory_reserve": 0.999})
    probe = measure(probed(), 8, section, sampler())
    assert probe.status == "out_of_memory"
    assert "memory_reserve" in probe.why


def test_utilization_is_sampled_as_long_as_the_strategy_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GpuUsageMaximizeSearch, "relative_error", 1.0)
    section = GpuUsageMaximizeSearch(
        strategy="gpu_usage_maximize", utilization_period_s=0.05, memory_reserve=0.0
    )
    probe = measure(probed(), 8, section, sampler())
    assert probe.utilization_pct > probe.utilization_mean_pct


def test_the_check_takes_more_steps() -> None:
    assert measure(probed(), 8, SECTION, sampler(), steps_factor=3).steps >= 3 * 5


def test_the_error_of_few_steps_is_between_the_prior_and_their_own_and_of_many_their_own() -> None:
    assert mean_and_error([2.0]) == (2.0, math.inf)
    assert mean_and_error([2.0, 2.0])[1] == pytest.approx((3 * 0.06**2 / 4 / 2) ** 0.5)
    few = mean_and_error([2.0, 4.0, 2.0, 4.0])
    assert few == (3.0, pytest.approx(((3 * 0.09**2 + 4) / 6 / 4) ** 0.5))
    many = list(np.random.default_rng(0).normal(10, 1, 10_000))
    assert mean_and_error(many)[1] == pytest.approx(0.01, rel=0.03)


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_a_probe_clips_as_the_training_does(clip_norm: float | None) -> None:
    training, norms = probed(clip_norm=clip_norm), []

    def record(*_: Any) -> None:
        gradients = [p.grad for p in training.model.parameters() if p.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())

    training.optimizer.register_step_pre_hook(record)
    measure(training, 4, SECTION, sampler())
    assert (max(norms) < 0.1001) == (clip_norm is not None)
