"""Time, device utilization and memory of a worker or slot during a command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from raytrain_opt.clock import monotonic_s
from raytrain_opt.errors import ResourcesError
from raytrain_opt.monitoring.samplers import CpuSampler, Sampler

_MIB = 2**20


@dataclass(frozen=True)
class Usage:
    """Resources that one command used."""

    duration_s: float
    utilization_pct: float | None = None  # of compute threads, or of the GPU in NVML's last window
    memory_mib: float | None = None  # peak of tensors on the GPU so far, or of the process now
    timings_s: Mapping[str, float] = field(default_factory=dict)  # as the command measured itself


class UsageMeter:
    """Measures each command, at a cost of some tens of microseconds on a CPU."""

    def __init__(self, sampler: Sampler | None, memory_mib: Callable[[], float]) -> None:
        self._sampler, self._memory_mib = sampler, memory_mib
        self._start_s = monotonic_s()

    @classmethod
    def for_this_process(cls) -> UsageMeter:
        """Return a meter of torch's GPU, else of the CPU time; imports no torch."""
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            return cls(_gpu_sampler(), lambda: torch.cuda.max_memory_allocated() / _MIB)
        process = psutil.Process()
        threads = 1 if torch is None else torch.get_num_threads()
        return cls(CpuSampler(threads), lambda: process.memory_info().rss / _MIB)

    def begin(self) -> None:
        """Start measuring a command."""
        self._start_s = monotonic_s()
        if self._sampler is not None:
            self._sampler.restart()

    def end(self, timings_s: Mapping[str, float]) -> Usage:
        """Return the usage since `begin`."""
        duration_s = monotonic_s() - self._start_s
        return Usage(duration_s, self._utilization_pct(), self._memory_mib(), dict(timings_s))

    def _utilization_pct(self) -> float | None:
        """Return the utilization; a GPU that fails to report it is not asked again."""
        try:
            return None if self._sampler is None else self._sampler.sample()
        except ResourcesError:
            self._sampler = None
            return None


def _gpu_sampler() -> Sampler | None:
    """Return None when NVML cannot monitor this GPU (MIG): training does not depend on it."""
    import torch

    from raytrain_opt.monitoring.nvml import NvmlSampler

    try:
        return NvmlSampler(str(torch.cuda.get_device_properties().uuid))
    except ResourcesError:
        return None
