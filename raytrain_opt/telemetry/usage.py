"""What a resident process uses while it does a command: time, device, memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from raytrain_opt.clock import monotonic_s
from raytrain_opt.errors import ResourcesError
from raytrain_opt.telemetry.nvml import NvmlSampler
from raytrain_opt.telemetry.utilization import CpuSampler, Sampler

_MIB = 2**20


@dataclass(frozen=True)
class Usage:
    """Of one command. `utilization_pct`: of the process's compute threads over the command, or
    NVML's last window at the end of it; None where a GPU tells nothing. `memory_mib`: most that
    tensors took of the GPU so far, or what the process has of the machine's memory.
    """

    seconds: float
    utilization_pct: float | None = None
    memory_mib: float | None = None
    parts_s: Mapping[str, float] = field(default_factory=dict)


class UsageMeter:
    """Read at the beginning and the end of each command: some tens of microseconds on a CPU."""

    def __init__(self, sampler: Sampler | None, memory_mib: Callable[[], float]) -> None:
        self._sampler, self._memory_mib = sampler, memory_mib
        self._began_s = monotonic_s()

    @classmethod
    def of_this_process(cls) -> UsageMeter:
        """On the GPU that torch uses here, if it does, else on this process's CPU time."""
        import psutil
        import torch

        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return cls(_gpu_sampler(), lambda: torch.cuda.max_memory_allocated() / _MIB)
        process = psutil.Process()
        return cls(CpuSampler(torch.get_num_threads()), lambda: process.memory_info().rss / _MIB)

    def begin(self) -> None:
        """A command begins."""
        self._began_s = monotonic_s()
        if self._sampler is not None:
            self._sampler.restart()

    def end(self, parts_s: Mapping[str, float]) -> Usage:
        """It is done; `parts_s` are the parts that it measured of itself."""
        seconds = monotonic_s() - self._began_s
        return Usage(seconds, self._busy_pct(), self._memory_mib(), dict(parts_s))

    def _busy_pct(self) -> float | None:
        """A GPU that tells no more is no reason to end a training: it is not asked again."""
        try:
            return None if self._sampler is None else self._sampler.sample()
        except ResourcesError:
            self._sampler = None
            return None


def _gpu_sampler() -> NvmlSampler | None:
    """None where NVML does not watch this GPU (MIG): the training needs no such figure."""
    import torch

    ordinal = torch.cuda.current_device()
    try:
        uuid = str(torch.cuda.get_device_properties(ordinal).uuid)
        return NvmlSampler.open(ordinal, uuid)
    except ResourcesError:
        return None
