"""Usage is measured from the start to the end of a command."""

from __future__ import annotations

import time

import pytest

from raytrain_opt.errors import ResourcesError
from raytrain_opt.monitoring.process_usage import UsageMeter
from tests.support.scripted_sampler import ScriptedSampler


def test_a_command_is_measured_from_begin_to_end() -> None:
    meter = UsageMeter(ScriptedSampler([40.0, 80.0]), lambda: 123.0)
    time.sleep(0.05)
    usages = []
    for _ in range(2):
        meter.begin()
        time.sleep(0.01)
        usages.append(meter.end({"load_s": 0.5}))
    assert [usage.utilization_pct for usage in usages] == [40.0, 80.0]
    assert all(0.01 <= usage.duration_s < 0.05 for usage in usages)
    assert (usages[0].memory_mib, usages[0].timings_s) == (123.0, {"load_s": 0.5})


def test_a_device_without_a_sampler_has_no_utilization() -> None:
    meter = UsageMeter(None, lambda: 123.0)
    meter.begin()
    assert meter.end({}).utilization_pct is None


def test_a_device_that_stops_reporting_ends_no_training() -> None:
    meter = UsageMeter(ScriptedSampler([40.0, ResourcesError("the GPU is lost")]), lambda: 123.0)
    usages = []
    for _ in range(3):
        meter.begin()
        usages.append(meter.end({}).utilization_pct)
    assert usages == [40.0, None, None]


def test_this_process_has_cpu_time_and_memory() -> None:
    import torch

    if torch.cuda.is_initialized():
        pytest.skip("another test has begun to use the GPU in this process")
    meter = UsageMeter.for_this_process()
    meter.begin()
    until_s = time.process_time() + 0.2
    while time.process_time() < until_s:
        pass
    usage = meter.end({})
    assert usage.utilization_pct is not None
    assert 0 < usage.utilization_pct <= 100
    assert usage.memory_mib is not None
    assert usage.memory_mib > 10
