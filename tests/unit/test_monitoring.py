"""The samplers of a CPU and of a GPU, and the thread that samples."""

# ruff: noqa: N802 - the fake has pynvml's names

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from raytrain_opt import monitoring
from raytrain_opt.errors import ResourcesError
from raytrain_opt.monitoring import (
    cpu_sampler,
    gpu_names,
    gpu_sampler,
    top_half_mean,
    watch_utilization,
)
from tests.support.scripted_sampler import ScriptedSampler

LONG_S = 60.0
SHORT_S = 0.001


class Counting(ScriptedSampler):
    """Sets `reached` after `enough` samples, so that no test waits for a clock."""

    def __init__(self, values: list[float | Exception], enough: int) -> None:
        super().__init__(values)
        self.left, self.reached = enough + 1, threading.Event()

    def __call__(self) -> float:
        self.left -= 1
        if self.left <= 0:
            self.reached.set()
        return super().__call__()


# The CPU sampler.


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock and the CPU time of this process, which the test sets."""
    fake_machine = SimpleNamespace(now_s=100.0, cpu_s=0.0)
    monkeypatch.setattr(monitoring, "process_time", lambda: fake_machine.cpu_s)
    monkeypatch.setattr(monitoring, "monotonic_s", lambda: fake_machine.now_s)
    return fake_machine


@pytest.mark.parametrize(
    ("threads", "cpu_s", "expected"),
    [(1, 1.0, 50.0), (1, 1.5, 75.0), (4, 2.0, 25.0), (2, 0.0, 0.0), (1, 3.0, 100.0)],
)
def test_cpu_time_over_the_time_of_the_threads(
    machine: SimpleNamespace, threads: int, cpu_s: float, expected: float
) -> None:
    machine.cpu_s = 7.0  # What was before the sampler does not count.
    sampler = cpu_sampler(threads)
    machine.now_s += 2.0
    machine.cpu_s += cpu_s
    assert sampler() == pytest.approx(expected)


def test_each_cpu_sample_starts_at_the_one_before(machine: SimpleNamespace) -> None:
    sampler = cpu_sampler(1)
    machine.now_s, machine.cpu_s = 101.0, 1.0
    assert sampler() == pytest.approx(100.0)
    machine.now_s, machine.cpu_s = 105.0, 2.0
    assert sampler() == pytest.approx(25.0)
    assert sampler() == 0.0


def test_the_cpu_time_is_that_of_the_real_process() -> None:
    sampler, started_s = cpu_sampler(1), time.process_time()
    while time.process_time() - started_s < 0.001:  # a short probe
        pass
    assert sampler() > 0
    time.sleep(0.2)
    assert sampler() < 50


# The thread that samples.


def test_a_block_shorter_than_a_period_gives_one_sample() -> None:
    with watch_utilization(ScriptedSampler([40.0, 80.0]), LONG_S) as samples:
        pass
    assert samples == [40.0]


def test_samples_are_taken_in_another_thread_while_the_block_runs() -> None:
    sampler = Counting([10.0, 20.0, 60.0], enough=3)
    with watch_utilization(sampler, SHORT_S) as samples:
        assert sampler.reached.wait(LONG_S)
    assert samples[:3] == [10.0, 20.0, 60.0]


def test_the_end_of_the_block_does_not_wait_for_a_period() -> None:
    started_s = time.monotonic()
    with watch_utilization(ScriptedSampler([1.0]), LONG_S):
        pass
    assert time.monotonic() - started_s < LONG_S / 10


@pytest.mark.parametrize(
    ("samples", "top"),
    [
        ([7.0], 7.0),
        ([10.0, 90.0], 90.0),
        ([90.0, 10.0, 80.0], 85.0),
        ([1.0, 2.0, 3.0, 4.0], 3.5),
        ([100.0, 0.0, 98.0, 2.0, 96.0], 98.0),
    ],
)
def test_the_mean_of_the_larger_half(samples: list[float], top: float) -> None:
    assert top_half_mean(samples) == pytest.approx(top)


def test_an_error_while_sampling_is_raised_at_the_end_of_the_block() -> None:
    sampler, ends = Counting([50.0, ResourcesError("the GPU is lost")], enough=2), []

    def run() -> None:
        with watch_utilization(sampler, SHORT_S):
            assert sampler.reached.wait(LONG_S)
            ends.append("the block")

    with pytest.raises(ResourcesError, match="the GPU is lost"):
        run()
    assert ends == ["the block"]


def test_an_error_of_the_block_is_not_hidden() -> None:
    sampler = Counting([ResourcesError("the GPU is lost")], enough=1)

    def run() -> None:
        with watch_utilization(sampler, SHORT_S):
            assert sampler.reached.wait(LONG_S)
            raise KeyError("the block")

    with pytest.raises(KeyError, match="the block"):
        run()


# NVML, against a fake of `pynvml`.

INSTEAD = "throughput_knee needs no utilization"
H100 = "NVIDIA H100"
A, B, C = (
    "GPU-aaaa1111-0000-0000-0000-000000000000",
    "GPU-aaaa2222-0000-0000-0000-000000000000",
    "GPU-cccc3333-0000-0000-0000-000000000000",
)


class NVMLError(Exception):
    """As in pynvml: every error of NVML is one of these."""


_KINDS = ("LibraryNotFound", "NotSupported", "NotFound", "NoPermission", "GpuIsLost")
ERRORS = {kind: type(f"NVMLError_{kind}", (NVMLError,), {}) for kind in _KINDS}


@dataclass
class FakeGpu:
    uuid: str
    name: str = H100
    busy: int = 0
    allowed: bool = True
    reports: bool = True


class FakeNvml(ModuleType):
    """NVML of one machine: GPUs in its own order."""

    def __init__(self, *gpus: FakeGpu, driver: bool = True) -> None:
        super().__init__("pynvml")
        self.NVMLError = NVMLError
        self.__dict__.update({error.__name__: error for error in ERRORS.values()})
        self.gpus, self.driver, self.lost = gpus, driver, False

    def nvmlInit(self) -> None:
        if not self.driver:
            raise ERRORS["LibraryNotFound"]

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if not self.gpus[index].allowed:
            raise ERRORS["NoPermission"]
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
        raise ERRORS["NotFound"]

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        if self.lost:
            raise ERRORS["GpuIsLost"]("GPU is lost")
        return gpu.name

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> SimpleNamespace:
        if self.lost:
            raise ERRORS["GpuIsLost"]("GPU is lost")
        if not gpu.reports:
            raise ERRORS["NotSupported"]
        return SimpleNamespace(gpu=gpu.busy, memory=0)


Machine = Callable[..., FakeNvml]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Machine:
    def install(*gpus: FakeGpu, **values: Any) -> FakeNvml:
        nvml = FakeNvml(*gpus, **values)
        monkeypatch.setattr("raytrain_opt.monitoring.pynvml", nvml)
        return nvml

    return install


@pytest.mark.parametrize("uuid", [C, C.removeprefix("GPU-")])
def test_a_gpu_is_found_by_its_uuid(gpus: Machine, uuid: str) -> None:
    gpus(FakeGpu(A, busy=5), FakeGpu(B), FakeGpu(C, busy=12))
    sampler = gpu_sampler(uuid)
    assert sampler() == 12.0


@pytest.mark.parametrize(
    "gpu", [FakeGpu(B), FakeGpu(A, reports=False)], ids=["unknown", "does not report"]
)
def test_a_gpu_that_nvml_cannot_watch_is_refused_at_once(gpus: Machine, gpu: FakeGpu) -> None:
    """A MIG instance has a UUID of its own, which torch writes like that of a GPU."""
    gpus(gpu)
    with pytest.raises(ResourcesError, match=f"watch {A}.*MIG instance.*{INSTEAD}"):
        gpu_sampler(A)


def test_without_a_driver_the_message_is_clear(gpus: Machine) -> None:
    gpus(driver=False)
    with pytest.raises(ResourcesError, match=f"NVIDIA driver.*{INSTEAD}"):
        gpu_sampler(A)


def test_an_error_on_the_way_is_explained(gpus: Machine) -> None:
    nvml = gpus(FakeGpu(A))
    sampler = gpu_sampler(A)
    nvml.lost = True
    with pytest.raises(ResourcesError, match=f"watch {A}: GPU is lost"):
        sampler()


def test_all_usable_gpus_have_names(gpus: Machine) -> None:
    gpus(FakeGpu(A), FakeGpu(B), FakeGpu(C, allowed=False))
    assert gpu_names() == [H100, H100]
    gpus(driver=False)
    assert gpu_names() == []


def test_a_lost_gpu_is_an_error_that_says_so(gpus: Machine) -> None:
    nvml = gpus(FakeGpu(A))
    nvml.lost = True
    with pytest.raises(ResourcesError, match="NVML cannot read the GPUs: GPU is lost"):
        gpu_names()
