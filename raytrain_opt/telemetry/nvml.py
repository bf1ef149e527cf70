"""Utilisation and energy of an NVIDIA GPU, as its driver's library NVML reports them.

NVML knows nothing of CUDA_VISIBLE_DEVICES and counts devices in another order than CUDA
does by default, so "device 0" may be two different cards. A UUID means the same to both.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from raytrain_opt.errors import ResourcesError

_INSTEAD = (
    "set batch_size_search.utilization.sampler: cpu to watch the CPU time of the process instead"
)


class NvmlSampler:
    """How busy one GPU is: the share of NVML's last window in which some kernel ran.

    The window is the driver's, between 1/6 s and 1 s depending on the GPU: samples closer
    together than that repeat themselves.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._open = gpu, True

    @classmethod
    def open(
        cls,
        ordinal: int = 0,
        uuid: str | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> NvmlSampler:
        """The GPU that this process calls CUDA device `ordinal`.

        Args:
            ordinal: as in torch's `cuda:1`, counted under CUDA_VISIBLE_DEVICES.
            uuid: of that device, with or without `GPU-`; it decides where it is given.
            environ: for CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.

        Raises:
            ResourcesError: no driver, no such device, a MIG instance, a GPU that does not
                report its utilisation, or one that cannot be told from others without `uuid`.
        """
        import pynvml

        with ExitStack() as undo:
            with _explained("start"):
                pynvml.nvmlInit()
            undo.callback(pynvml.nvmlShutdown)
            with _explained("list the GPUs"):
                sampler = cls(find_gpu(_accessible_gpus(), ordinal, uuid, environ))
            sampler.sample()  # A GPU that does not report says so now, not in a thread.
            undo.pop_all()
        return sampler

    @property
    def uuid(self) -> str:
        """Of the physical GPU, as NVML writes it."""
        return self._gpu.uuid

    def restart(self) -> None:
        """Nothing to do: NVML's window is its own."""

    def sample(self) -> float:
        """Percent of NVML's last window."""
        import pynvml

        with _explained(f"read the utilisation of {self._gpu}"):
            return float(pynvml.nvmlDeviceGetUtilizationRates(self._gpu.handle).gpu)

    def energy_j(self) -> float | None:
        """Joule since the driver was loaded; None where the GPU does not count them."""
        import pynvml

        with _explained(f"read the energy of {self._gpu}"):
            try:
                return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu.handle)) / 1e3
            except pynvml.NVMLError_NotSupported:
                return None

    def close(self) -> None:
        """Leave NVML; a second call does nothing."""
        import pynvml

        if self._open:
            self._open = False
            pynvml.nvmlShutdown()


GpuState = tuple[str, int, int, tuple[str, ...]]


def gpu_states() -> tuple[str | None, list[GpuState]]:
    """The driver's version, and of every GPU its name, memory (MiB), how much of it is taken, and
    the processes that compute on it. No version and no GPUs on a machine without a driver.
    """
    import pynvml

    with ExitStack() as undo:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError_LibraryNotFound:
            return None, []
        except pynvml.NVMLError as error:
            raise ResourcesError(f"NVML could not start: {error}") from error
        undo.callback(pynvml.nvmlShutdown)
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        return driver, [_state(gpu) for gpu in _accessible_gpus()]


def _state(gpu: Gpu) -> GpuState:
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(gpu.handle)
    pids = [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu.handle)]
    names = tuple(_process_name(pid) for pid in pids)
    return gpu.name, memory.total // 1024**2, memory.used // 1024**2, names


def _process_name(pid: int) -> str:
    """Those of another container have a number here, and no name."""
    import psutil

    try:
        return f"{psutil.Process(pid).name()} (process {pid})"
    except psutil.Error:
        return f"process {pid}"


@dataclass(frozen=True)
class Gpu:
    """A physical GPU and NVML's handle of it."""

    handle: Any
    uuid: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.uuid})"


def find_gpu(
    gpus: Sequence[Gpu], ordinal: int, uuid: str | None, environ: Mapping[str, str]
) -> Gpu:
    """The one among NVML's that CUDA device `ordinal` runs on; see `NvmlSampler.open`.

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    entry = _visible_entry(visible, ordinal)
    if entry is not None and entry.startswith("MIG-"):
        raise _mig_error(entry)
    if uuid is not None:
        return _by_uuid(gpus, uuid)
    if entry is None:
        raise ResourcesError(
            f"CUDA device {ordinal} is not among CUDA_VISIBLE_DEVICES={visible}; {_INSTEAD}"
        )
    if entry.isdecimal():
        return _by_index(gpus, int(entry), environ.get("CUDA_DEVICE_ORDER"))
    return _by_uuid(gpus, entry)


def _visible_entry(visible: str | None, ordinal: int) -> str | None:
    """What CUDA_VISIBLE_DEVICES has for a device, which may be any if it is not set; None for
    one that it hides, as it does all from the first invalid entry on, such as -1.
    """
    if visible is None:
        return str(ordinal)
    entries = (part.strip() for part in visible.split(","))
    valid = list(takewhile(re.compile(r"\d+$|GPU-|MIG-").match, entries))
    return valid[ordinal] if ordinal < len(valid) else None


def _by_index(gpus: Sequence[Gpu], index: int, order: str | None) -> Gpu:
    """By CUDA's number. NVML counts in the order of the bus, CUDA by default puts the fastest
    first: the two agree where all GPUs are equal or CUDA is told to count like NVML.
    """
    if index >= len(gpus):
        raise ResourcesError(f"NVML sees no GPU number {index}, only {_listed(gpus)}; {_INSTEAD}")
    if order != "PCI_BUS_ID" and len({gpu.name for gpu in gpus}) > 1:
        raise ResourcesError(
            f"which of {_listed(gpus)} is CUDA device {index} is not known: CUDA may count "
            "unequal GPUs in another order than NVML; set CUDA_DEVICE_ORDER=PCI_BUS_ID, or write "
            f"UUIDs in CUDA_VISIBLE_DEVICES, or {_INSTEAD}"
        )
    return gpus[index]


def _by_uuid(gpus: Sequence[Gpu], uuid: str) -> Gpu:
    """By UUID or by its first characters, as CUDA takes them, if only one GPU has them."""
    wanted = uuid.removeprefix("GPU-").lower()
    found = [gpu for gpu in gpus if gpu.uuid.removeprefix("GPU-").lower().startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if not found and (uuid.startswith("MIG-") or _is_mig(wanted)):
        raise _mig_error(uuid)
    count = "several GPUs" if found else "no GPU"
    raise ResourcesError(f"{count} of {_listed(gpus)} match {uuid}; {_INSTEAD}")


def _listed(gpus: Sequence[Gpu]) -> str:
    return ", ".join(map(str, gpus)) or "none"


def _mig_error(name: str) -> ResourcesError:
    return ResourcesError(
        f"{name} is a MIG instance, a slice of a GPU, of which NVML reports no utilisation; "
        f"{_INSTEAD}, or use a whole GPU"
    )


def _is_mig(uuid: str) -> bool:
    """CUDA can report a MIG instance's UUID, and torch writes every UUID without its kind."""
    import pynvml

    try:
        pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
    except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
        return False
    return True


def _accessible_gpus() -> list[Gpu]:
    """In NVML's order. Those that this process may not use do not count, as for CUDA."""
    import pynvml

    gpus = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError_NoPermission:
            continue
        uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
        gpus.append(Gpu(handle, uuid, name))
    return gpus


@contextmanager
def _explained(task: str) -> Iterator[None]:
    """NVML's errors in words of the job."""
    import pynvml

    try:
        yield
    except pynvml.NVMLError_LibraryNotFound as error:
        raise ResourcesError(
            f"NVML, which comes with the NVIDIA driver, is not on this machine; {_INSTEAD}"
        ) from error
    except pynvml.NVMLError_NotSupported as error:
        raise ResourcesError(
            f"NVML cannot {task}: the GPU does not support it, as one that is split by MIG does "
            f"not; {_INSTEAD}"
        ) from error
    except pynvml.NVMLError as error:
        raise ResourcesError(f"NVML could not {task}: {error}; {_INSTEAD}") from error
