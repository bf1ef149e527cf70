"""How busy the device is while something runs: samplers behind one interface, and a monitor.

Notation: a sample is a percentage; "top half" is the mean of the largest 50 % of the samples,
the figure that MBSO's GpuUsageMaximize steers by.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import ceil, nan
from statistics import fmean
from types import TracebackType
from typing import Protocol

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.batch_size import UtilizationSection
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.telemetry.nvml import NvmlSampler


class Sampler(Protocol):
    """Says how busy a device is. Used by one thread at a time; its owner closes it."""

    def restart(self) -> None:
        """What was before does not count: the next sample's interval starts here."""

    def sample(self) -> float:
        """Percent, 0 to 100, since the last call, or now where the device says no more."""
        ...

    def energy_j(self) -> float | None:
        """A counter of all energy the device has used, in joule; None where not known."""
        ...

    def close(self) -> None:
        """Give back what it holds; a second call does nothing."""


def open_sampler(
    section: UtilizationSection,
    *,
    use_gpu: bool,
    threads: int,
    gpu_uuid: str | None = None,
    ordinal: int = 0,
) -> Sampler:
    """The sampler that the job asks for.

    Args:
        section: batch_size_search.utilization.
        use_gpu: whether the process trains on a GPU.
        threads: its compute threads; the CPU sampler's 100 % is all of them busy.
        gpu_uuid: of its GPU, from torch; needed where the GPUs of a node are not equal.
        ordinal: of its GPU under CUDA_VISIBLE_DEVICES.

    Raises:
        JobError: nvml without a GPU.
        ResourcesError: NVML cannot watch this GPU.
    """
    if section.sampler == "nvml" and not use_gpu:
        rule = "must be cpu or auto where the job trains without a GPU"
        raise JobError([Problem("batch_size_search.utilization.sampler", rule, "'nvml'")])
    if section.sampler == "cpu" or not use_gpu:
        return CpuSampler(threads)
    return NvmlSampler.open(ordinal, gpu_uuid)


class CpuSampler:
    """CPU time of this process, all its threads, over the time of its compute threads.

    The system counts CPU time in ticks, mostly of 10 ms: a sample of 50 ms and one thread
    is right to 20 %, one of 1 s to 1 %.
    """

    def __init__(self, threads: int) -> None:
        import psutil

        self._process, self._threads = psutil.Process(), threads
        self.restart()

    def restart(self) -> None:
        self._wall_s, self._busy_s = monotonic_s(), self._cpu_s()

    def sample(self) -> float:
        """Percent since the last call; more busy threads than promised are not more than 100."""
        wall_s, busy_s = self._wall_s, self._busy_s
        self.restart()
        available_s = (self._wall_s - wall_s) * self._threads
        return min(100.0, 100.0 * (self._busy_s - busy_s) / available_s) if available_s else 0.0

    def energy_j(self) -> float | None:
        return None

    def close(self) -> None:
        return None

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


class ScriptedSampler:
    """Says what it was given, for tests. The last value repeats; an exception is raised.

    >>> sampler = ScriptedSampler([10.0, 80.0])
    >>> [sampler.sample() for _ in range(3)]
    [10.0, 80.0, 80.0]
    """

    def __init__(
        self, values: Sequence[float | Exception], energies_j: Sequence[float | None] = (None,)
    ) -> None:
        self._values, self._energies_j = list(values), list(energies_j)
        self.closed = False

    def restart(self) -> None:
        return None

    def sample(self) -> float:
        value = self._values.pop(0) if len(self._values) > 1 else self._values[0]
        if isinstance(value, Exception):
            raise value
        return value

    def energy_j(self) -> float | None:
        return self._energies_j.pop(0) if len(self._energies_j) > 1 else self._energies_j[0]

    def close(self) -> None:
        self.closed = True


class UtilizationMonitor:
    """Samples in a thread of its own while its body runs; the results are read afterwards.

    `samples` has a percentage per period, or one for the whole body where that was shorter.
    `energy_j` is what the device used between start and end, in joule, None where not known.
    An error of the sampler is raised at the end of the body, or noted on the body's own.

    >>> with UtilizationMonitor(ScriptedSampler([40.0]), period_s=1.0) as monitor:
    ...     pass
    >>> monitor.samples
    [40.0]
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
        self._thread.join()
        if error is not None:
            if self._failure is not None:
                error.add_note(f"sampling the utilisation failed as well: {self._failure!r}")
            return
        if self._failure is not None:
            raise self._failure
        self._finish()

    @property
    def mean_pct(self) -> float:
        """Mean of the samples; NaN without any."""
        return fmean(self.samples) if self.samples else nan

    @property
    def top_half_mean_pct(self) -> float:
        """Mean of the largest half of the samples, of n the ceil(n/2) largest; NaN without any."""
        top = sorted(self.samples, reverse=True)[: ceil(len(self.samples) / 2)]
        return fmean(top) if top else nan

    def _watch(self) -> None:
        try:
            while not self._stop.wait(self._period_s):
                self.samples.append(self._sampler.sample())
        except Exception as error:  # noqa: BLE001 - raised where the body ends
            self._failure = error

    def _finish(self) -> None:
        if not self.samples:
            self.samples.append(self._sampler.sample())
        after_j = self._sampler.energy_j()
        if after_j is not None and self._energy_before_j is not None:
            self.energy_j = after_j - self._energy_before_j
