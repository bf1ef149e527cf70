"""Utilization and energy of GPUs from NVML, by UUID: its order differs from CUDA's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import pynvml

from raytrain_opt.errors import ResourcesError
from raytrain_opt.monitoring.samplers import Sampler

_ALTERNATIVE = "set batch_size_search.utilization.sampler: cpu to sample CPU time instead"


class NvmlSampler(Sampler):
    """Utilization of one GPU in NVML's last window, which has a length of 1/6 s to 1 s."""

    def __init__(self, uuid: str) -> None:
        """Open the GPU with this UUID. Raises ResourcesError: no driver, no such GPU, MIG."""
        self.uuid = f"GPU-{uuid.removeprefix('GPU-')}"
        with ExitStack() as stack:
            with _explained("start"):
                pynvml.nvmlInit()
            stack.callback(pynvml.nvmlShutdown)
            with _explained(f"open {self.uuid}"):
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(self.uuid)
            self.sample()  # raise now, not in a thread, if the GPU reports nothing
            self._opened = stack.pop_all()

    def sample(self) -> float:
        with _explained(f"read the utilization of {self.uuid}"):
            return float(pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)

    def energy_j(self) -> float | None:
        """Return joule since the driver was loaded; None when the GPU does not count energy."""
        with _explained(f"read the energy of {self.uuid}"):
            try:
                return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3
            except pynvml.NVMLError_NotSupported:
                return None

    def close(self) -> None:
        self._opened.close()


@contextmanager
def _explained(task: str) -> Iterator[None]:
    """Turn errors of NVML into errors that name the setting to change."""
    try:
        yield
    except pynvml.NVMLError_LibraryNotFound as error:
        raise ResourcesError(
            f"this machine has no NVML, which is part of the NVIDIA driver; {_ALTERNATIVE}"
        ) from error
    except (pynvml.NVMLError_NotFound, pynvml.NVMLError_NotSupported) as error:
        raise ResourcesError(
            f"NVML cannot {task}: {error}, for example because it is a MIG instance; "
            f"{_ALTERNATIVE}, or use a GPU without MIG"
        ) from error
    except pynvml.NVMLError as error:
        raise ResourcesError(f"NVML could not {task}: {error}; {_ALTERNATIVE}") from error


@dataclass(frozen=True)
class GpuState:
    """A GPU and what uses it now; `processes` are the ones that compute on it."""

    name: str
    memory_mib: int
    used_mib: int
    processes: tuple[str, ...]


def gpu_states() -> list[GpuState]:
    """Return the usable GPUs, none without NVML. Raises ResourcesError."""
    with ExitStack() as stack:
        try:
            pynvml.nvmlInit()
            stack.callback(pynvml.nvmlShutdown)
            states = []
            for index in range(pynvml.nvmlDeviceGetCount()):
                try:
                    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                except pynvml.NVMLError_NoPermission:
                    continue
                states.append(_state(handle))
            return states
        except pynvml.NVMLError_LibraryNotFound:
            return []
        except pynvml.NVMLError as error:
            raise ResourcesError(f"NVML cannot read the GPUs: {error}") from error


def _state(handle: Any) -> GpuState:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    pids = [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    return GpuState(
        pynvml.nvmlDeviceGetName(handle),
        memory.total // 1024**2,
        memory.used // 1024**2,
        tuple(map(_process_name, pids)),
    )


def _process_name(pid: int) -> str:
    """Return name and number; a process of another container has only a number here."""
    try:
        return f"{psutil.Process(pid).name()} (process {pid})"
    except psutil.Error:
        return f"process {pid}"
