"""Where the two blocking calls live that keep the pools: `Tuner.fit` and `TorchTrainer.fit`.

An actor of its own, not the driver: its death ends everything it started, at any moment of
the start-up, and the driver neither imports Ray Train and Ray Tune nor has threads in them.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raytrain_opt.pools.setup import Setup

# Read when Ray Train and Ray Tune are imported or start something. What the user set stays.
_ENVIRONMENT = {
    # Members keep the driver's working directory: data paths in a job are relative to it.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # We write records and TensorBoard events ourselves, one set for the whole run.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
    # How soon a pool notices that its members have left (seconds).
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
}
# A machine of one's own is not preempted; this saves a process at the start.
_LOCAL_ENVIRONMENT = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}


class Host:
    """Runs the pools; each method returns when its pool has ended, and raises why."""

    def __init__(self, *, local: bool, start_s: float, import_all: bool) -> None:
        environment = _ENVIRONMENT | (_LOCAL_ENVIRONMENT if local else {})
        environment["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(start_s)
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        # Modules that import each other in circles must not be imported by two threads.
        self._importing = threading.Lock()
        if import_all:
            import raytrain_opt.pools.slots
            import raytrain_opt.pools.workers  # noqa: F401

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
