"""Utilization of a device in percent: samplers, and a monitor that uses one in a thread.

GPUs are read from NVML by UUID: its order differs from CUDA's.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from math import ceil, nan
from statistics import fmean
from time import process_time
from types import TracebackType

import pynvml

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.batch_size import UtilizationSection
from raytrain_opt.errors import JobError, Problem, ResourcesError

# A sample takes milliseconds; a driver of a GPU that hangs must not keep this process alive.
_STOP_S = 10.0


class Sampler(ABC):
    """Source of utilization samples. Used by one thread at a time; its owner closes it."""

    @abstractmethod
    def sample(self) -> float:
        """Return percent, 0..100, since the last call, or now if the device reports only that."""

    def restart(self) -> None:  # noqa: B027 - not all devices let us choose the interval
        """Start the interval of the next sample now."""

    def energy_j(self) -> float | None:
        """Return the device's energy counter in joule; None when it has none."""
        return None

    def close(self) -> None:  # noqa: B027 - not all samplers have resources
        """Release resources; a second call does nothing."""


def open_sampler(
    section: UtilizationSection, *, threads: int, gpu_uuid: str | None = None
) -> Sampler:
    """Open the sampler that batch_size_search.utilization requests.

    threads: compute threads of the process; when all are busy, the CPU sampler returns 100 %.
    gpu_uuid: UUID of the GPU on which the process trains, from torch; None without a GPU.

    Raises JobError for nvml without a GPU, ResourcesError if NVML cannot monitor this GPU.
    """
    if section.sampler == "nvml" and gpu_uuid is None:
        rule = "must be cpu or auto when the job trains without a GPU"
        raise JobError([Problem("batch_size_search.utilization.sampler", rule, "'nvml'")])
    if section.sampler == "cpu" or gpu_uuid is None:
        return CpuSampler(threads)
    return NvmlSampler(gpu_uuid)


class CpuSampler(Sampler):
    """CPU time of all threads of this process, relative to the time of its compute threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self.restart()

    def restart(self) -> None:
        # Not from psutil, which reads ticks of 10 ms: a short probe has had none.
        self._wall_s, self._busy_s = monotonic_s(), process_time()

    def sample(self) -> float:
        """Return percent since the last call, at most 100 also when more threads are busy."""
        wall_s, busy_s = self._wall_s, self._busy_s
        self.restart()
        available_s = (self._wall_s - wall_s) * self._threads
        return min(100.0, 100.0 * (self._busy_s - busy_s) / available_s) if available_s else 0.0


class NullSampler(Sampler):
    """A sampler for a device whose utilization is not known."""

    def sample(self) -> float:
        return nan


class UtilizationMonitor:
    """Context manager that samples in its own thread while its body runs.

    Afterwards, `samples` has one percentage per period, or a single one for a body shorter than a
    period, and `energy_j` the device's energy in joule between start and end, None when unknown.
    An error of the sampler is raised at the end of the body, or added to the body's own error as
    a note.

    >>> with UtilizationMonitor(CpuSampler(threads=1), period_s=60.0) as monitor:
    ...     pass
    >>> len(monitor.samples)
    1
    """

    def __init__(self, sampler: Sampler, period_s: float) -> None:
        self._sampler, self._period_s = sampler, period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="utilization")
        self._failure: Exception | None = None
        self._energy_before_j: float | None = None
        self.samples: list[float] = []
        self.energy_j: float | None = None

    def __enter__(self) -> UtilizationMonitor:
        self._energy_before_j = self._sampler.energy_j()
        self._sampler.restart()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(_STOP_S)
        if error is not None:
            if self._failure is not None:
                error.add_note(f"sampling the utilization failed as well: {self._failure!r}")
            return
        if self._failure is not None:
            raise self._failure
        if not self.samples:
            self.samples.append(self._sampler.sample())
        after_j = self._sampler.energy_j()
        if after_j is not None and self._energy_before_j is not None:
            self.energy_j = after_j - self._energy_before_j

    @property
    def mean_pct(self) -> float:
        """Mean of the samples; NaN without any."""
        return fmean(self.samples) if self.samples else nan

    @property
    def top_half_mean_pct(self) -> float:
        """Mean of the ceil(n/2) largest of n samples; NaN without any."""
        top = sorted(self.samples, reverse=True)[: ceil(len(self.samples) / 2)]
        return fmean(top) if top else nan

    def _watch(self) -> None:
        try:
            while not self._stop.wait(self._period_s):
                self.samples.append(self._sampler.sample())
        except Exception as error:  # noqa: BLE001 - raised at the end of the body
            self._failure = error


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


def gpu_names() -> list[str]:
    """Return the names of the usable GPUs, none without NVML. Raises ResourcesError."""
    with ExitStack() as stack:
        try:
            pynvml.nvmlInit()
            stack.callback(pynvml.nvmlShutdown)
            names = []
            for index in range(pynvml.nvmlDeviceGetCount()):
                with suppress(pynvml.NVMLError_NoPermission):
                    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                    names.append(str(pynvml.nvmlDeviceGetName(handle)))
            return names
        except pynvml.NVMLError_LibraryNotFound:
            return []
        except pynvml.NVMLError as error:
            raise ResourcesError(f"NVML cannot read the GPUs: {error}") from error
