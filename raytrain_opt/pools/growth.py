"""Clusters that grow: a job that does not fit yet waits for nodes that are on their way.

Ray does not tell whether nodes can still come. `ray up` leaves its file on the head, where
drivers run: as long as fewer nodes are there than it allows, more may come. KubeRay leaves a
variable. Where neither is found, what does not fit is refused at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
import yaml

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import ResourcesError
from raytrain_opt.pools.resources import PoolPlan, Resources, plan_pools
from raytrain_opt.pools.session import alive_nodes, free_resources

_LOOK_AGAIN_S = 5.0
_CLUSTER_FILE = Path("~/ray_bootstrap_config.yaml")
_KUBERAY = "RAY_USAGE_STATS_KUBERAY_IN_USE"


def plan_when_there_is_room(job: Job, candidates: int, note: Callable[[str], None]) -> PoolPlan:
    """As `plan_pools`; where nodes may still come, it waits for them up to `limits.start_s`.

    Raises ResourcesError saying what is missing.
    """
    try:
        return plan_pools(job, free_resources(), candidates)
    except ResourcesError as error:
        if not may_grow(len(alive_nodes())):
            raise
        refused = error
    limit_s = job.limits.start_s
    note(f"waiting for nodes up to {limit_s:.0f} s (limits.start_s): {refused}")
    until_s = monotonic_s() + limit_s
    with _asked_for(worker_requests(job)):
        while monotonic_s() < until_s:
            time.sleep(_LOOK_AGAIN_S)
            try:
                return plan_pools(job, free_resources(), candidates)
            except ResourcesError as error:
                refused = error
    raise ResourcesError(f"{refused} The cluster did not grow within {limit_s:.0f} s.")


def may_grow(nodes: int) -> bool:
    """Whether more nodes than these may come, as far as the head knows."""
    if os.environ.get(_KUBERAY) == "1":
        return True
    path = _CLUSTER_FILE.expanduser()
    if not path.is_file():
        return False
    cluster = yaml.safe_load(path.read_text(encoding="utf-8"))
    return nodes < 1 + int(cluster.get("max_workers", 0))


def worker_requests(job: Job) -> list[Resources]:
    """What the workers will ask for, as far as it is known before the nodes are."""
    one = {"GPU": 1.0} if job.workers.use_gpu is True else {"CPU": 1.0}
    each = dict(job.workers.resources or one)
    return [each] * job.workers.count


@contextmanager
def _asked_for(requests: list[Resources]) -> Iterator[None]:
    """The autoscaler brings nodes for a placement group that waits. It ends with this process,
    however that ends, so that no node is kept for nobody.
    """
    group = ray.util.placement_group(requests)
    try:
        yield
    finally:
        ray.util.remove_placement_group(group)
