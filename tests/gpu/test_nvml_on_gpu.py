"""NVML against CUDA: the same device, and its load. No Ray."""

from __future__ import annotations

import time

import pytest
import torch

from raytrain_opt.monitoring import gpu_names, gpu_sampler, top_half_mean, watch_utilization

pytest.importorskip("pynvml")
# The compiler and the debug mode warn about themselves, each version of torch differently.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

LOAD_S = 3.0


def uuid_of(ordinal: int) -> str:
    return str(torch.cuda.get_device_properties(ordinal).uuid)


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
        assert 0 <= gpu_sampler(uuid_of(ordinal))() <= 100


def test_load_raises_the_utilization() -> None:
    keep_busy(1.0)
    with watch_utilization(gpu_sampler(uuid_of(0)), period_s=0.2) as samples:
        keep_busy(LOAD_S)
    assert top_half_mean(samples) > 50
    assert len(samples) > 5


def test_the_cuda_devices_are_among_the_reported_gpus() -> None:
    assert torch.cuda.get_device_properties(0).name in gpu_names()
