"""A job that does not fit yet waits for other jobs, and for nodes that are on their way.

Ray has no call that says whether nodes can still join. `ray up` leaves its file on the head, where
drivers run: as long as the cluster has fewer nodes than the file allows, more may join. KubeRay
leaves an environment variable. Without either, a job that does not fit is refused at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import ray
import yaml

from raytrain_opt.clock import monotonic_s
from raytrain_opt.cluster.connection import alive_nodes, free_resources, total_resources
from raytrain_opt.cluster.resources import PoolPlan, PoolRequest, Resources, plan_pools
from raytrain_opt.config.processes import WorkersSection
from raytrain_opt.errors import ResourcesError

# A cloud node takes a minute or more to join: no need to look more often.
_POLL_S = 5.0
# A run that has just ended, in this driver or another one, has given back what it held by then.
_RELEASE_S, _RELEASE_POLL_S = 5.0, 0.2
_CLUSTER_FILE = Path("~/ray_bootstrap_config.yaml")
_KUBERAY = "RAY_USAGE_STATS_KUBERAY_IN_USE"


def plan_when_there_is_room(
    request: PoolRequest, limit_s: float, note: Callable[[str], None]
) -> PoolPlan:
    """Plan as `plan_pools` with what other jobs leave free.

    If that is too little, wait up to `timeouts.start_s` for them, and for nodes that may join.
    `limit_s`: the value of that setting. `note` is called with a message when the wait begins.

    Raises ResourcesError saying what is missing: at once if it would not fit into an idle cluster
    that cannot grow.
    """
    began_s, is_noted = monotonic_s(), False
    refused = ResourcesError("other jobs hold what this one needs.")
    waiting = f"waiting up to {limit_s:.0f} s (timeouts.start_s) for room: "
    try:
        ideal = plan_pools(request, total_resources())
    except ResourcesError as error:
        if not may_grow(len(alive_nodes())):
            raise
        note(f"{waiting}{error}")
        is_noted = True
        ideal = _plan_when_nodes_joined(request, began_s, limit_s)
    # With GPUs that others hold now, `auto` still means these.
    workers = request.workers.model_copy(update={"use_gpu": ideal.use_gpu})
    request = replace(request, workers=workers)
    joined_s = monotonic_s()
    while monotonic_s() - began_s < limit_s:
        settled = monotonic_s() - joined_s >= _RELEASE_S
        try:
            plan = plan_pools(request, free_resources())
            if settled or plan == ideal:
                return plan
        except ResourcesError as error:
            refused = error
            if settled and not is_noted:
                note(f"{waiting}{refused}")
                is_noted = True
        time.sleep(_POLL_S if settled else _RELEASE_POLL_S)
    raise ResourcesError(f"{refused} There was no room within {limit_s:.0f} s.")


def _plan_when_nodes_joined(request: PoolRequest, began_s: float, limit_s: float) -> PoolPlan:
    """Plan for an idle cluster that has grown; what the request for nodes held is free then."""
    with _request_nodes(worker_requests(request.workers)):
        while True:
            try:
                return plan_pools(request, total_resources())
            except ResourcesError as error:
                if monotonic_s() - began_s >= limit_s:
                    rule = f"{error} There was no room within {limit_s:.0f} s."
                    raise ResourcesError(rule) from error
            time.sleep(_POLL_S)


def may_grow(nodes: int) -> bool:
    """Return whether more nodes may join than the cluster has, as far as the head knows."""
    if os.environ.get(_KUBERAY) == "1":
        return True
    path = _CLUSTER_FILE.expanduser()
    if not path.is_file():
        return False
    cluster = yaml.safe_load(path.read_text(encoding="utf-8"))
    return nodes < 1 + int(cluster.get("max_workers", 0))


def worker_requests(workers: WorkersSection) -> list[Resources]:
    """Return what the workers will ask for, as far as it is known before the nodes join."""
    default = {"GPU": 1.0} if workers.use_gpu is True else {"CPU": 1.0}
    return [dict(workers.resources or default)] * workers.size


@contextmanager
def _request_nodes(requests: list[Resources]) -> Iterator[None]:
    """Make the autoscaler start nodes, for a placement group that ends with this process."""
    group = ray.util.placement_group(requests)
    try:
        yield
    finally:
        ray.util.remove_placement_group(group)
