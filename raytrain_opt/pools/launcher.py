"""The actor that keeps the pools: `Tuner.fit` and `TorchTrainer.fit` block in it.

It is not the driver for two reasons: its death ends everything it started, at any moment of the
start-up; and the driver neither imports Ray Train and Ray Tune nor has threads in them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from raytrain_opt.threads import WAIT_POLICY

if TYPE_CHECKING:
    from raytrain_opt.pools.programs import ResidentConfig

# Of the launcher and of every process it starts. What the user set in the driver's stays.
_ENVIRONMENT = {
    # Residents keep the driver's working directory: data paths in a job are relative to it.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # We write records and TensorBoard events ourselves, one set for the run.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
    # How soon a pool notices that its residents have left (seconds).
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
    # Ray runs the training in a second thread, where glibc's allocator hands freed activations
    # back to the system in every step. One arena that keeps them (bytes: the largest
    # threshold that glibc takes, and more than a step frees): 12 % more samples/s on CPU.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 1024**2),
    "MALLOC_TRIM_THRESHOLD_": str(4 * 1024**3),
}
_LOCAL_ENVIRONMENT = {
    # A local machine is not preempted; without the watcher one process less starts.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # Ray Tune sets it in its actors, which can be forks only where all processes have it.
    "PL_DISABLE_FORK": "1",
    # The driver would wait for Ray's first processes without a limit, also where Ray has given
    # them up, because the fork server of a busy machine took more than a minute to import.
    "RAY_prestart_worker_first_driver": "0",
    # Ray's 15 leaves a training beside two busy programs a few percent of the cores.
    "RAY_worker_niceness": "0",
    # Gradients stay on this machine: no other machine can connect.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


def environment(*, local: bool, start_s: float) -> dict[str, str]:
    """Return the launcher's environment variables; `local`: Ray runs on this machine alone."""
    # The wait policy is in this process's environment already, unless the user decided.
    defaults = _ENVIRONMENT | (_LOCAL_ENVIRONMENT if local else {})
    defaults |= {name: "" for name in WAIT_POLICY if name in os.environ}
    defaults["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(start_s)
    return {name: os.environ.get(name, value) for name, value in defaults.items()}


class PoolLauncher:
    """Runs the pools. Each method returns when its pool has ended, and raises why."""

    def __init__(self) -> None:
        # Here, because modules that import each other in circles must not be imported by two
        # threads, and each method has one.
        from raytrain_opt.pools import train_and_tune

        self._pools = train_and_tune

    def run_slots(self, config: ResidentConfig) -> None:
        self._pools.run_slots(config)

    def run_workers(self, config: ResidentConfig) -> None:
        self._pools.run_workers(config, config.program.trainer(config))
