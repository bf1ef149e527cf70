"""What a node reports about itself, collected by an actor on every node."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass

from raytrain_opt import storage
from raytrain_opt.config.data import DatasetData, ImageFolderData
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import ResourcesError, StorageError
from raytrain_opt.monitoring.nvml import GpuState, gpu_states
from raytrain_opt.recording.recorder import versions

_MIB = 1024**2


@dataclass(frozen=True)
class NodeFacts:
    """One node."""

    host: str
    versions: dict[str, str]  # by package
    shm_mib: int
    gpus: tuple[GpuState, ...] = ()
    driver: str | None = None  # NVIDIA's; None without a GPU
    gpu_error: str | None = None
    data_problems: tuple[str, ...] = ()
    # From Ray, or measured from the driver's node.
    ray_gpus: float = 0.0
    object_store_mib: int = 0
    clock_offset_s: float = 0.0
    clock_uncertainty_s: float = 0.0
    ready_s: float = 0.0
    # Whether the node sees a file that the driver wrote, and the driver one that the node wrote.
    sees_storage: bool = True
    storage_seen: bool = True
    storage_error: str | None = None


class NodeInspector:
    """An actor on one node; imports what the processes of a run import."""

    def facts(self, job: Job | None) -> NodeFacts:
        """Return what the node itself knows."""
        import torch  # noqa: F401 - as the processes of a run do

        gpu_error = None
        try:
            driver, gpus = gpu_states()
        except ResourcesError as error:
            driver, gpus, gpu_error = None, [], str(error)
        shm = os.statvfs("/dev/shm")
        return NodeFacts(
            host=socket.gethostname(),
            versions=versions(),
            shm_mib=shm.f_frsize * shm.f_blocks // _MIB,
            gpus=tuple(gpus),
            driver=driver,
            gpu_error=gpu_error,
            data_problems=_data_problems(job),
        )

    def now(self) -> float:
        """Return the seconds since 1970 by this node's clock."""
        return time.time()

    def check_storage(
        self, storage_path: str, driver_file: str, node_file: str
    ) -> tuple[bool, str | None]:
        """Return whether the driver's file is visible here, and why ours cannot be written."""
        try:
            visible = storage.read(storage_path, driver_file) is not None
            storage.write(storage_path, node_file, b"written by raytrain-opt doctor")
        except StorageError as error:
            return False, str(error)
        return visible, None


def _data_problems(job: Job | None) -> tuple[str, ...]:
    """Check data that every worker and slot reads itself; the driver reads in-memory sets."""
    from raytrain_opt.execution.preflight import check_data

    if job is None or not isinstance(job.data, ImageFolderData | DatasetData):
        return ()
    return tuple(str(problem) for problem in check_data(job.data))
