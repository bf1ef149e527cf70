"""Utilization and energy of NVIDIA GPUs, from the driver's library NVML.

NVML ignores CUDA_VISIBLE_DEVICES, and its default order of devices differs from CUDA's, so
"device 0" may be two different GPUs. A UUID identifies the same GPU for both.
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

_ALTERNATIVE = "set batch_size_search.utilization.sampler: cpu to sample CPU time instead"


class NvmlSampler:
    """Utilization of one GPU: fraction of NVML's last window in which a kernel was running.

    The driver's window is between 1/6 s and 1 s long, depending on the GPU; samples at shorter
    intervals repeat a value.
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
        """Open the GPU that is CUDA device `ordinal` of this process.

        Args:
            ordinal: as in torch's `cuda:1`, counted under CUDA_VISIBLE_DEVICES.
            uuid: UUID of that device, with or without `GPU-`; takes precedence over `ordinal`.
            environ: holds CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.

        Raises:
            ResourcesError: no driver, no such device, a MIG instance, a GPU that does not
                report its utilization, or a GPU that cannot be identified without `uuid`.
        """
        import pynvml

        with ExitStack() as undo:
            with _explained("start"):
                pynvml.nvmlInit()
            undo.callback(pynvml.nvmlShutdown)
            with _explained("list the GPUs"):
                sampler = cls(find_gpu(_accessible_gpus(), ordinal, uuid, environ))
            sampler.sample()  # raise now, not in a thread, if the GPU reports nothing
            undo.pop_all()
        return sampler

    @property
    def uuid(self) -> str:
        """UUID of the physical GPU, as NVML writes it."""
        return self._gpu.uuid

    def restart(self) -> None:
        """Do nothing: NVML chooses its window."""

    def sample(self) -> float:
        """Return percent of NVML's last window."""
        import pynvml

        with _explained(f"read the utilization of {self._gpu}"):
            return float(pynvml.nvmlDeviceGetUtilizationRates(self._gpu.handle).gpu)

    def energy_j(self) -> float | None:
        """Return joule since the driver was loaded; None when the GPU does not count energy."""
        import pynvml

        with _explained(f"read the energy of {self._gpu}"):
            try:
                return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu.handle)) / 1e3
            except pynvml.NVMLError_NotSupported:
                return None

    def close(self) -> None:
        """Shut NVML down; a second call does nothing."""
        import pynvml

        if self._open:
            self._open = False
            pynvml.nvmlShutdown()


GpuState = tuple[str, int, int, tuple[str, ...]]


def gpu_states() -> tuple[str | None, list[GpuState]]:
    """Return the driver's version and the state of every GPU; (None, []) without a driver.

    A state is: name, memory (MiB), used memory (MiB), compute processes. Raises ResourcesError.
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
    """Return name and number; a process of another container has only a number here."""
    import psutil

    try:
        return f"{psutil.Process(pid).name()} (process {pid})"
    except psutil.Error:
        return f"process {pid}"


@dataclass(frozen=True)
class Gpu:
    """A physical GPU with its NVML handle."""

    handle: Any
    uuid: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.uuid})"


def find_gpu(
    gpus: Sequence[Gpu], ordinal: int, uuid: str | None, environ: Mapping[str, str]
) -> Gpu:
    """Return the GPU that is CUDA device `ordinal`; see `NvmlSampler.open`.

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
            f"CUDA device {ordinal} is not among CUDA_VISIBLE_DEVICES={visible}; {_ALTERNATIVE}"
        )
    if entry.isdecimal():
        return _by_index(gpus, int(entry), environ.get("CUDA_DEVICE_ORDER"))
    return _by_uuid(gpus, entry)


def _visible_entry(visible: str | None, ordinal: int) -> str | None:
    """Return the entry of CUDA_VISIBLE_DEVICES for a device; None for a hidden device.

    All devices are visible when the variable is not set. An invalid entry, such as -1, hides all
    devices from there on.
    """
    if visible is None:
        return str(ordinal)
    entries = (part.strip() for part in visible.split(","))
    valid = list(takewhile(re.compile(r"\d+$|GPU-|MIG-").match, entries))
    return valid[ordinal] if ordinal < len(valid) else None


def _by_index(gpus: Sequence[Gpu], index: int, order: str | None) -> Gpu:
    """Return the GPU with this CUDA index, when NVML has the same order.

    NVML orders GPUs by bus, CUDA by default puts the fastest first: the orders agree when all
    GPUs are equal, or with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    if index >= len(gpus):
        raise ResourcesError(
            f"NVML sees no GPU number {index}, only {_names(gpus)}; {_ALTERNATIVE}"
        )
    if order != "PCI_BUS_ID" and len({gpu.name for gpu in gpus}) > 1:
        raise ResourcesError(
            f"CUDA device {index} may be any of {_names(gpus)}: CUDA and NVML can order GPUs of "
            "different models differently; set CUDA_DEVICE_ORDER=PCI_BUS_ID, or use UUIDs in "
            f"CUDA_VISIBLE_DEVICES, or {_ALTERNATIVE}"
        )
    return gpus[index]


def _by_uuid(gpus: Sequence[Gpu], uuid: str) -> Gpu:
    """Return the only GPU whose UUID begins with `uuid`; CUDA accepts such prefixes as well."""
    prefix = uuid.removeprefix("GPU-").lower()
    matches = [gpu for gpu in gpus if gpu.uuid.removeprefix("GPU-").lower().startswith(prefix)]
    if len(matches) == 1:
        return matches[0]
    if not matches and (uuid.startswith("MIG-") or _is_mig(prefix)):
        raise _mig_error(uuid)
    count = "several GPUs" if matches else "no GPU"
    raise ResourcesError(f"{count} of {_names(gpus)} match {uuid}; {_ALTERNATIVE}")


def _names(gpus: Sequence[Gpu]) -> str:
    return ", ".join(map(str, gpus)) or "none"


def _mig_error(name: str) -> ResourcesError:
    return ResourcesError(
        f"{name} is a MIG instance, for which NVML reports no utilization; {_ALTERNATIVE}, or use "
        "a GPU without MIG"
    )


def _is_mig(uuid: str) -> bool:
    """Return whether this UUID, which torch writes without its kind, is a MIG instance's."""
    import pynvml

    try:
        pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
    except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
        return False
    return True


def _accessible_gpus() -> list[Gpu]:
    """Return the GPUs that this process may use, in NVML's order."""
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
    """Turn errors of NVML into errors that name the setting to change."""
    import pynvml

    try:
        yield
    except pynvml.NVMLError_LibraryNotFound as error:
        raise ResourcesError(
            f"this machine has no NVML, which is part of the NVIDIA driver; {_ALTERNATIVE}"
        ) from error
    except pynvml.NVMLError_NotSupported as error:
        raise ResourcesError(
            f"NVML cannot {task}: the GPU does not support it, for example because it is divided "
            f"by MIG; {_ALTERNATIVE}"
        ) from error
    except pynvml.NVMLError as error:
        raise ResourcesError(f"NVML could not {task}: {error}; {_ALTERNATIVE}") from error
