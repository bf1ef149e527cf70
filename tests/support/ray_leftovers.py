"""What a run left behind in Ray."""

from __future__ import annotations

import ray

from raytrain_opt.cluster.ray_private import read_placement_groups


def placement_groups() -> set[str]:
    """Return the placement groups of this driver that hold or wait for resources."""
    job_id = ray.get_runtime_context().get_job_id()
    return {group for group in read_placement_groups() if group.endswith(job_id)}
