"""Compute threads on the CPU: how many, and how they wait; and work beside the main thread.

After each operation the threads of OpenMP wait for the last one. By default they spin meanwhile:
where another program has the core of one of them, training is 10 to 90 times slower than with one
thread. So they sleep, after some microseconds that cover the gaps between small operations: to
wake a thread takes longer than many of these. One thread per idle core waits for nobody.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TypeVar

R = TypeVar("R")

# OpenMP reads them when torch is loaded; processes that are started here inherit them. GNU's
# takes the number of spins, each of some nanoseconds, and 300,000 by default; others the policy.
WAIT_POLICY = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}
# The kernel counts in units of 10 ms.
_SAMPLE_S = 0.25


def set_wait_policy() -> bool:
    """Let waiting threads sleep, unless the user decided; return whether it is too late here."""
    if os.environ.keys() & WAIT_POLICY.keys():
        return False
    os.environ.update(WAIT_POLICY)
    return "torch" in sys.modules


# Whether torch was imported before this package, in a process without a policy.
THREADS_SPIN = set_wait_policy()


@dataclass(frozen=True)
class Cores:
    """The cores that this process may use; `idle`: so many of them are not used by others."""

    available: int
    idle: float
    requested: int | None = None  # threads of a process, by the user's OMP_NUM_THREADS

    @classmethod
    def measure(cls) -> Cores:
        """Measure for a moment what others use, unless the user has set OMP_NUM_THREADS."""
        available = available_cores()
        text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        if text.isdecimal() and int(text) > 0:
            return cls(available, available, int(text))
        return cls(available, min(_idle_cores(), available))

    def threads(self, processes: int = 1) -> int:
        """Return the threads of each of the processes, which compute at the same time.

        Where others use all cores, they share them with a quarter as many threads.
        """
        usable = max(1, self.available // 4, int(self.idle + 0.5))
        return self.requested or max(1, usable // processes)

    def choose(
        self,
        processes: int,
        note: Callable[[str], None],
        fastest: Callable[[int], int] | None = None,
    ) -> int:
        """Return the threads of each process, and say why they are fewer than its cores.

        fastest: times the training and returns the number of threads to use, at most that given.
        """
        most = self.threads(processes)
        self._tell(most, processes, note)
        if fastest is None or self.requested is not None or most == 1:
            return most
        threads = fastest(most)
        if threads < most:
            note(
                f"computing with {threads} of {most} threads per process: more are not faster for "
                "this network and batch (workers.threads sets another number)"
            )
        return threads

    def _tell(self, threads: int, processes: int, note: Callable[[str], None]) -> None:
        """Say where other programs, or torch, make computing slower than it could be."""
        if self.requested is None and threads < self.available // processes:
            note(
                f"other programs use {self.available - self.idle:.1f} of {self.available} cores: "
                f"computing with {threads} per process (workers.threads sets another number)"
            )
        if THREADS_SPIN and threads > 1:
            note(
                "torch was imported before raytrain_opt, so its threads spin while they wait, "
                "which is slow where other programs need a core. Import raytrain_opt first, or "
                "set OMP_WAIT_POLICY=passive"
            )


def available_cores(control_groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores that affinity and control group let this process use."""
    limit = math.inf
    version_2 = (control_groups / "cpu.max").exists()
    names = ("cpu.max",) if version_2 else ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
    with suppress(OSError, ValueError):  # of a system without control groups, or without a limit
        quota, period = " ".join((control_groups / name).read_text() for name in names).split()
        limit = int(quota) / int(period) if quota != "-1" else limit
    return max(1, int(min(len(os.sched_getaffinity(0)), limit)))


def _idle_cores() -> float:
    """Measure how many cores of this process's affinity others leave idle."""
    import psutil

    cores = os.sched_getaffinity(0)

    def idle_s() -> float:
        times = psutil.cpu_times(percpu=True)
        waiting_s = (t.idle + getattr(t, "iowait", 0.0) for i, t in enumerate(times) if i in cores)
        # What this process computes meanwhile, such as imports, it will not compute later.
        return sum(waiting_s) + time.process_time()

    began_s, before_s = time.monotonic(), idle_s()
    time.sleep(_SAMPLE_S)
    return (idle_s() - before_s) / (time.monotonic() - began_s)


def compute_threads(threads: int | None, residents_on_node: int, cores: int | None = None) -> int:
    """Return a resident's compute threads on CPU: the job's, or an even part of the cores."""
    return threads or max(1, (cores or available_cores()) // residents_on_node)


def start_thread(function: Callable[[], R]) -> Future[R]:
    """Call a function in a thread that ends with the process, even if its work never does."""
    future: Future[R] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised where the result is needed
            future.set_exception(error)

    Thread(target=call, daemon=True).start()
    return future
