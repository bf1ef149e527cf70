"""NVML against CUDA: the same device, its load and its energy. No Ray.

make test-gpu      or, in an environment with torch and without Ray:
python -m pytest -m gpu tests/gpu
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from raytrain_opt.config.batch_size import UtilizationSection
from raytrain_opt.monitoring import (
    NvmlSampler,
    UtilizationMonitor,
    gpu_names,
    open_sampler,
)

pytest.importorskip("pynvml")
# The compiler and the debug mode warn about themselves, each version of torch differently.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

LOAD_S = 3.0


def uuid_of(ordinal: int) -> str:
    return str(torch.cuda.get_device_properties(ordinal).uuid)


@pytest.fixture
def sampler() -> Iterator[NvmlSampler]:
    opened = NvmlSampler(uuid_of(0))
    yield opened
    opened.close()


def keep_busy(seconds: float) -> None:
    """Products of matrices, at most a few queued at a time."""
    x = torch.rand(4096, 4096, device="cuda:0")
    started_s = time.monotonic()
    while time.monotonic() - started_s < seconds:
        for _ in range(10):
            x @ x
        torch.cuda.synchronize(0)


def test_the_device_is_that_of_cuda() -> None:
    for ordinal in range(torch.cuda.device_count()):
        sampler = NvmlSampler(uuid_of(ordinal))
        assert sampler.uuid == f"GPU-{uuid_of(ordinal)}"
        sampler.close()


def test_load_raises_the_utilization_and_the_energy(sampler: NvmlSampler) -> None:
    keep_busy(1.0)
    with UtilizationMonitor(sampler, period_s=0.2) as monitor:
        keep_busy(LOAD_S)
    assert monitor.top_half_mean_pct > 50
    assert len(monitor.samples) > 5
    if sampler.energy_j() is None:
        pytest.skip("this GPU does not count its energy")
    assert monitor.energy_j is not None
    assert monitor.energy_j > 10 * LOAD_S


def test_a_job_on_a_gpu_gets_nvml() -> None:
    section = UtilizationSection(sampler="auto")
    sampler = open_sampler(section, threads=1, gpu_uuid=uuid_of(0))
    assert isinstance(sampler, NvmlSampler)
    assert 0 <= sampler.sample() <= 100
    sampler.close()


def test_the_cuda_devices_are_among_the_reported_gpus() -> None:
    assert torch.cuda.get_device_properties(0).name in gpu_names()
