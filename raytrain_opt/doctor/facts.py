"""What a node tells about itself. An actor of its own on every node asks."""

from __future__ import annotations

import os
import platform
import socket
import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from raytrain_opt.config.schema import DatasetData, ImageFolderData, Job
from raytrain_opt.errors import CommitError
from raytrain_opt.paths import read_stored, write_stored

_MIB = 1024**2


@dataclass(frozen=True)
class GpuFacts:
    """One GPU as NVML sees it; `processes` are those that compute on it now."""

    name: str
    memory_mib: int
    used_mib: int
    processes: tuple[str, ...]


@dataclass(frozen=True)
class NodeFacts:
    """One node; sizes in MiB. `versions` by package; `driver` is NVIDIA's, where there is one."""

    host: str
    versions: dict[str, str]
    shm_mib: int
    gpus: tuple[GpuFacts, ...] = ()
    driver: str | None = None
    data_problems: tuple[str, ...] = ()
    # Of Ray, and measured from the driver's node.
    ray_gpus: float = 0.0
    object_store_mib: int = 0
    clock_offset_s: float = 0.0
    clock_uncertainty_s: float = 0.0
    ready_s: float = 0.0
    # What became of a file that the driver wrote, and of one that the node wrote.
    sees_storage: bool = True
    storage_seen: bool = True
    storage_error: str | None = None


class Examiner:
    """On one node, in a process like those of a run: it imports what they do."""

    def facts(self, job: Job | None) -> NodeFacts:
        """All that the node itself knows."""
        from raytrain_opt.telemetry.nvml import gpu_states

        driver, gpus = gpu_states()
        shm = os.statvfs("/dev/shm")
        return NodeFacts(
            host=socket.gethostname(),
            versions=_versions(),
            shm_mib=shm.f_frsize * shm.f_blocks // _MIB,
            gpus=tuple(GpuFacts(*state) for state in gpus),
            driver=driver,
            data_problems=_data_problems(job),
        )

    def now(self) -> float:
        """Seconds since 1970 by this node's clock."""
        return time.time()

    def storage(self, place: str, theirs: str, mine: str) -> tuple[bool, str | None]:
        """Whether the driver's file is there; and why ours cannot be written, if so."""
        try:
            seen = read_stored(place, theirs) is not None
            write_stored(place, mine, b"written by raytrain-opt doctor")
        except CommitError as error:
            return False, str(error)
        return seen, None


def _versions() -> dict[str, str]:
    import ray
    import torch

    import raytrain_opt

    return {
        "python": platform.python_version(),
        "ray": ray.__version__,
        "torch": torch.__version__,
        "torchvision": version("torchvision"),
        "raytrain_opt": raytrain_opt.__version__,
    }


def _data_problems(job: Job | None) -> tuple[str, ...]:
    """Of data that every worker and slot reads itself; in-memory sets are read by the driver."""
    from raytrain_opt.check import check_data

    section: Any = None if job is None else job.data
    if job is None or not isinstance(section, ImageFolderData | DatasetData):
        return ()
    return tuple(str(problem) for problem in check_data(job))
