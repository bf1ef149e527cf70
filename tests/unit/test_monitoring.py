"""The CPU sampler, the choice of a sampler, and the monitor."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_opt import monitoring
from raytrain_opt.config.batch_size import UtilizationSection
from raytrain_opt.errors import JobError, ResourcesError
from raytrain_opt.monitoring import (
    CpuSampler,
    UtilizationMonitor,
    open_sampler,
)
from tests.support.scripted_sampler import ScriptedSampler

LONG_S = 60.0
SHORT_S = 0.001


def section(sampler: Any) -> UtilizationSection:
    return UtilizationSection(sampler=sampler)


def monitor_of(*samples: float) -> UtilizationMonitor:
    monitor = UtilizationMonitor(ScriptedSampler([0.0]), LONG_S)
    monitor.samples = list(samples)
    return monitor


class Counting(ScriptedSampler):
    """Sets `reached` after `enough` samples, so that no test waits for a clock."""

    def __init__(self, values: list[float | Exception], enough: int) -> None:
        super().__init__(values)
        self.left, self.reached = enough, threading.Event()
        self.threads: set[str] = set()

    def sample(self) -> float:
        self.threads.add(threading.current_thread().name)
        self.left -= 1
        if self.left <= 0:
            self.reached.set()
        return super().sample()


# Which sampler a job gets.


@pytest.mark.parametrize(("sampler", "uuid"), [("auto", None), ("cpu", None), ("cpu", "GPU-1")])
def test_the_cpu_is_watched_where_there_is_no_gpu_or_the_job_says_so(
    sampler: str, uuid: str | None
) -> None:
    assert isinstance(open_sampler(section(sampler), threads=1, gpu_uuid=uuid), CpuSampler)


@pytest.mark.parametrize("sampler", ["auto", "nvml"])
def test_a_gpu_is_watched_by_nvml(sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "NvmlSampler", lambda uuid: uuid)
    assert open_sampler(section(sampler), threads=1, gpu_uuid="GPU-1") == "GPU-1"


def test_nvml_without_a_gpu_is_an_error_of_the_job() -> None:
    with pytest.raises(JobError) as caught:
        open_sampler(section("nvml"), threads=1)
    (problem,) = caught.value.problems
    assert problem.path == "batch_size_search.utilization.sampler"
    assert "cpu or auto" in problem.rule
    assert problem.value == "'nvml'"


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
    [
        (1, 1.0, 50.0),
        (1, 1.5, 75.0),
        (4, 2.0, 25.0),
        (2, 0.0, 0.0),
        (1, 3.0, 100.0),
    ],
)
def test_cpu_time_over_the_time_of_the_threads(
    machine: SimpleNamespace, threads: int, cpu_s: float, expected: float
) -> None:
    machine.cpu_s = 7.0  # What was before the sampler does not count.
    sampler = CpuSampler(threads)
    machine.now_s += 2.0
    machine.cpu_s += cpu_s
    assert sampler.sample() == pytest.approx(expected)


def test_each_cpu_sample_starts_at_the_one_before(machine: SimpleNamespace) -> None:
    sampler = CpuSampler(1)
    machine.now_s, machine.cpu_s = 101.0, 1.0
    assert sampler.sample() == pytest.approx(100.0)
    machine.now_s, machine.cpu_s = 105.0, 2.0
    assert sampler.sample() == pytest.approx(25.0)
    assert sampler.sample() == 0.0


def test_the_cpu_time_is_that_of_the_real_process() -> None:
    sampler, started_s = CpuSampler(1), time.process_time()
    while time.process_time() - started_s < 0.001:  # a short probe
        pass
    assert sampler.sample() > 0
    time.sleep(0.2)
    assert sampler.sample() < 50
    assert sampler.energy_j() is None


# The monitor.


def test_a_body_shorter_than_a_period_gives_one_sample() -> None:
    with UtilizationMonitor(ScriptedSampler([40.0, 80.0]), LONG_S) as monitor:
        pass
    assert monitor.samples == [40.0]
    assert monitor.mean_pct == monitor.top_half_mean_pct == 40.0


def test_samples_are_taken_in_another_thread_while_the_body_runs() -> None:
    sampler = Counting([10.0, 20.0, 60.0], enough=3)
    with UtilizationMonitor(sampler, SHORT_S) as monitor:
        assert sampler.reached.wait(LONG_S)
    assert monitor.samples[:3] == [10.0, 20.0, 60.0]
    assert threading.current_thread().name not in sampler.threads
    assert len(sampler.threads) == 1


def test_the_thread_is_gone_when_the_body_ends_and_did_not_wait_for_its_period() -> None:
    started_s = time.monotonic()
    with UtilizationMonitor(ScriptedSampler([1.0]), LONG_S):
        assert any(thread.name == "utilization" for thread in threading.enumerate())
    assert time.monotonic() - started_s < LONG_S / 10
    assert all(thread.name != "utilization" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("samples", "mean", "top"),
    [
        ([7.0], 7.0, 7.0),
        ([10.0, 90.0], 50.0, 90.0),
        ([90.0, 10.0, 80.0], 60.0, 85.0),
        ([1.0, 2.0, 3.0, 4.0], 2.5, 3.5),
        ([100.0, 0.0, 98.0, 2.0, 96.0], 59.2, 98.0),
    ],
)
def test_the_mean_and_the_mean_of_the_larger_half(
    samples: list[float], mean: float, top: float
) -> None:
    monitor = monitor_of(*samples)
    assert monitor.mean_pct == pytest.approx(mean)
    assert monitor.top_half_mean_pct == pytest.approx(top)
    assert monitor.samples == samples


def test_without_samples_there_is_no_mean() -> None:
    assert math.isnan(monitor_of().mean_pct)
    assert math.isnan(monitor_of().top_half_mean_pct)


@pytest.mark.parametrize(
    ("energies_j", "expected"),
    [
        ([1000.0, 1250.5], 250.5),
        ([None], None),
        ([None, 5.0], None),
        ([5.0, None], None),
    ],
)
def test_the_energy_is_what_the_body_used(
    energies_j: list[float | None], expected: float | None
) -> None:
    with UtilizationMonitor(ScriptedSampler([1.0], energies_j), LONG_S) as monitor:
        pass
    assert monitor.energy_j == expected


def test_an_error_while_sampling_reaches_the_caller_at_the_end() -> None:
    lost = ResourcesError("the GPU is lost")
    sampler, ends = Counting([50.0, lost], enough=2), []
    monitor = UtilizationMonitor(sampler, SHORT_S)

    def run() -> None:
        with monitor:
            assert sampler.reached.wait(LONG_S)
            ends.append("the body")

    with pytest.raises(ResourcesError) as caught:
        run()
    assert caught.value is lost
    assert ends == ["the body"]
    assert monitor.samples == [50.0]


def test_an_error_of_the_body_is_not_hidden() -> None:
    sampler = Counting([ResourcesError("the GPU is lost")], enough=1)

    def run() -> None:
        with UtilizationMonitor(sampler, SHORT_S):
            assert sampler.reached.wait(LONG_S)
            raise KeyError("the body")

    with pytest.raises(KeyError) as caught:
        run()
    assert caught.value.args == ("the body",)
    (note,) = caught.value.__notes__
    assert "the GPU is lost" in note
