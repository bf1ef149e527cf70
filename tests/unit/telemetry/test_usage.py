"""What a command used is measured from its beginning to its end."""

from __future__ import annotations

import time

import pytest

from raytrain_opt.errors import ResourcesError
from raytrain_opt.telemetry.usage import UsageMeter
from raytrain_opt.telemetry.utilization import ScriptedSampler


def test_a_command_is_measured_from_begin_to_end() -> None:
    meter = UsageMeter(ScriptedSampler([40.0, 80.0]), lambda: 123.0)
    time.sleep(0.05)
    found = []
    for _ in range(2):
        meter.begin()
        time.sleep(0.01)
        found.append(meter.end({"load_s": 0.5}))
    assert [usage.utilization_pct for usage in found] == [40.0, 80.0]
    assert all(0.01 <= usage.seconds < 0.05 for usage in found)
    assert (found[0].memory_mib, found[0].parts_s) == (123.0, {"load_s": 0.5})


def test_a_device_that_tells_nothing_has_no_utilisation() -> None:
    meter = UsageMeter(None, lambda: 123.0)
    meter.begin()
    assert meter.end({}).utilization_pct is None


def test_a_device_that_tells_no_more_ends_nothing() -> None:
    meter = UsageMeter(ScriptedSampler([40.0, ResourcesError("the GPU is lost")]), lambda: 123.0)
    found = []
    for _ in range(3):
        meter.begin()
        found.append(meter.end({}).utilization_pct)
    assert found == [40.0, None, None]


def test_this_process_has_cpu_time_and_memory() -> None:
    import torch

    if torch.cuda.is_initialized():
        pytest.skip("another test has begun to use the GPU in this process")
    meter = UsageMeter.of_this_process()
    meter.begin()
    until_s = time.process_time() + 0.2
    while time.process_time() < until_s:
        pass
    usage = meter.end({})
    assert usage.utilization_pct is not None
    assert 0 < usage.utilization_pct <= 100
    assert usage.memory_mib is not None
    assert usage.memory_mib > 10
