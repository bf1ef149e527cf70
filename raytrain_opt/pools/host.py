"""Where the two blocking calls live that keep the pools: `Tuner.fit` and `TorchTrainer.fit`.

An actor of its own, not the driver: its death ends everything it started, at any moment of
the start-up, and the driver neither imports Ray Train and Ray Tune nor has threads in them.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raytrain_opt.pools.probes import Found, ProbeRecord, ProbeSetup
    from raytrain_opt.pools.setup import Setup

# Of the host and of every process it starts. What the user set in the driver's stays.
_ENVIRONMENT = {
    # Members keep the driver's working directory: data paths in a job are relative to it.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # We write records and TensorBoard events ourselves, one set for the whole run.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
    # How soon a pool notices that its members have left (seconds).
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
    # Ray runs the training in a second thread, where glibc's allocator hands freed activations
    # back to the system in every step. One arena that keeps them (bytes: the largest
    # threshold that glibc takes, and more than a step frees): 12 % more samples/s on CPU.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 1024**2),
    "MALLOC_TRIM_THRESHOLD_": str(4 * 1024**3),
}
# A machine of one's own is not preempted; this saves a process at the start.
_LOCAL_ENVIRONMENT = {
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # Gradients stay on this machine: nobody else is let in.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


def environment(*, local: bool, start_s: float) -> dict[str, str]:
    """Environment variables to start the host with (its children inherit them). `local`: Ray
    runs on this machine alone. `start_s`: limit of the workers' start, seconds.
    """
    ours = _ENVIRONMENT | (_LOCAL_ENVIRONMENT if local else {})
    ours["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(start_s)
    return {name: os.environ.get(name, value) for name, value in ours.items()}


class Host:
    """Runs the pools; each method returns when its pool has ended, and raises why."""

    def __init__(self, *, import_all: bool) -> None:
        # Modules that import each other in circles must not be imported by two threads.
        self._importing = threading.Lock()
        self._records: list[ProbeRecord] = []
        if import_all:
            import raytrain_opt.pools.slots
            import raytrain_opt.pools.workers  # noqa: F401

    def run_probes(self, setup: ProbeSetup) -> Found:
        """See `pools.probes`."""
        with self._importing:
            from raytrain_opt.pools.probes import run_probes
        return run_probes(setup, self._records.append)

    def probe_records(self, after: int) -> list[ProbeRecord]:
        """Those so far, without the first `after`."""
        return self._records[after:]

    def run_slots(self, setup: Setup) -> None:
        """See `pools.slots`."""
        with self._importing:
            from raytrain_opt.pools.slots import run_slots
        run_slots(setup)

    def run_workers(self, setup: Setup) -> None:
        """See `pools.workers`."""
        with self._importing:
            from raytrain_opt.pools.workers import run_workers
        run_workers(setup)
