"""What both pools are started with."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, cast

import ray

from raytrain_opt.config.schema import Job
from raytrain_opt.data.array_sets import Arrays
from raytrain_opt.pools.faults import Faults
from raytrain_opt.pools.resources import PoolPlan
from raytrain_opt.pools.shards import ServerHandles


@dataclass(frozen=True)
class Setup:
    """Given to every worker and slot."""

    job: Job
    plan: PoolPlan
    run_id: str
    mailbox: Any  # handle of the Mailbox actor
    ray_storage_path: str
    faults: Faults = ()
    server: ServerHandles | None = None  # with parallel.mode: async

    @property
    def leave_s(self) -> float:
        """How long a member may take to leave when its pool is closed."""
        return self.job.limits.stop_s / 2

    def fetch_shared(self) -> Arrays | None:
        """In-memory data, shared with the node's other processes; waits for the driver to
        have read them.
        """
        boxed = ray.get(self.mailbox.shared_data.remote())
        return cast("Arrays | None", ray.get(boxed[0]))


def threads_for(given: int | None, members_on_node: int) -> int:
    """Compute threads of a member on CPU: as given, or an even share of the node's cores."""
    return given or max(1, len(os.sched_getaffinity(0)) // members_on_node)
