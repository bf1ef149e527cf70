"""Utilization of a device in percent, sampled in a thread.

GPUs are read from NVML by UUID: its order differs from CUDA's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from math import ceil
from statistics import fmean
from threading import Event
from time import process_time

import pynvml

from raytrain_opt.clock import monotonic_s
from raytrain_opt.errors import ResourcesError
from raytrain_opt.threads import start_thread

# A sample takes milliseconds; a driver of a GPU that hangs must not keep this process alive.
_STOP_S = 10.0

Sampler = Callable[[], float]
"""Return percent, 0..100, since the last call, or now if the device reports only that."""


def cpu_sampler(threads: int) -> Sampler:
    """Sample the CPU time of this process, relative to the time of its compute threads."""
    # Not from psutil, which reads ticks of 10 ms: a short probe has had none.
    wall_s, busy_s = monotonic_s(), process_time()

    def sample() -> float:
        nonlocal wall_s, busy_s
        before_s, wall_s = wall_s, monotonic_s()
        busy_before_s, busy_s = busy_s, process_time()
        available_s = (wall_s - before_s) * threads
        return min(100.0, 100.0 * (busy_s - busy_before_s) / available_s) if available_s else 0.0

    return sample


def gpu_sampler(uuid: str) -> Sampler:
    """Sample the utilization of a GPU in NVML's last window, which has a length of 1/6 s to 1 s.

    Raises ResourcesError, here and when it samples: no driver, no such GPU, MIG.
    """
    uuid = f"GPU-{uuid.removeprefix('GPU-')}"

    def sample() -> float:
        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        except pynvml.NVMLError as error:
            raise ResourcesError(
                f"NVML, a part of the NVIDIA driver, cannot watch {uuid}: {error}. It watches no "
                "MIG instance; batch_size_search.strategy: throughput_knee needs no utilization"
            ) from error

    sample()
    return sample


@contextmanager
def watch_utilization(sampler: Sampler, period_s: float) -> Iterator[list[float]]:
    """Sample in a thread while the block runs; yield the list that is filled.

    It has one percentage per period, or a single one after a block shorter than a period. An
    error of the sampler is raised at the end of a block that has raised none.
    """
    stop, samples = Event(), list[float]()

    def watch() -> None:
        while not stop.wait(period_s):
            samples.append(sampler())

    sampler()  # the interval of the next one begins now
    watching = start_thread(watch)
    try:
        yield samples
    finally:
        stop.set()
        wait([watching], _STOP_S)
    if watching.done():
        watching.result()
    if not samples:
        samples.append(sampler())


def top_half_mean(samples: list[float]) -> float:
    """Return the mean of the ceil(n/2) largest of n samples."""
    return fmean(sorted(samples, reverse=True)[: ceil(len(samples) / 2)])


def gpu_names() -> list[str]:
    """Return the names of the usable GPUs, none without NVML. Raises ResourcesError."""
    names = []
    try:
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            with suppress(pynvml.NVMLError_NoPermission):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                names.append(str(pynvml.nvmlDeviceGetName(handle)))
    except pynvml.NVMLError_LibraryNotFound:
        return []
    except pynvml.NVMLError as error:
        raise ResourcesError(f"NVML cannot read the GPUs: {error}") from error
    return names
