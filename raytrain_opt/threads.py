"""Compute threads on the CPU: how many, and how they wait; and work beside the main thread.

After each operation the threads of OpenMP wait for the last one. By default they spin meanwhile:
where another program has the core of one of them, training is 10 to 90 times slower than with one
thread. So they sleep, after some microseconds that cover the gaps between small operations: to
wake a thread takes longer than many of these.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TypeVar

R = TypeVar("R")

# OpenMP reads them when torch is loaded; processes that are started here inherit them. GNU's
# takes the number of spins, each of some nanoseconds, and 300,000 by default; others the policy.
WAIT_POLICY = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}


def set_wait_policy() -> bool:
    """Let waiting threads sleep, unless the user decided; return whether it is too late here."""
    if os.environ.keys() & WAIT_POLICY.keys():
        return False
    os.environ.update(WAIT_POLICY)
    return "torch" in sys.modules


# Whether torch was imported before this package, in a process without a policy.
THREADS_SPIN = set_wait_policy()


def choose_threads(
    processes: int, note: Callable[[str], None], fastest: Callable[[int], int] | None = None
) -> int:
    """Return the threads of each process: the user's OMP_NUM_THREADS, or a part of the cores.

    fastest: times the training and returns the number of threads to use, at most that given.
    """
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    requested = int(text) if text.isdecimal() else 0
    most = compute_threads(requested, processes)
    if THREADS_SPIN and most > 1:
        note(
            "torch was imported before raytrain_opt, so its threads spin while they wait, which "
            "is slow where other programs need a core. Import raytrain_opt first, or set "
            "OMP_WAIT_POLICY=passive"
        )
    if fastest is None or requested or most == 1:
        return most
    if (threads := fastest(most)) < most:
        note(
            f"computing with {threads} of {most} threads per process: more are not faster for "
            "this network and batch (workers.threads sets another number)"
        )
    return threads


def available_cores(control_groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores that affinity and control group let this process use."""
    limit = math.inf
    with suppress(OSError, ValueError):  # of a system without control groups, or without a limit
        version_2 = (control_groups / "cpu.max").exists()
        names = ("cpu.max",) if version_2 else ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
        quota, period = " ".join((control_groups / name).read_text() for name in names).split()
        limit = int(quota) / int(period) if quota != "-1" else limit
    return max(1, int(min(len(os.sched_getaffinity(0)), limit)))


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
