"""A job that does not fit yet waits for other jobs, and for nodes that are on their way.

Ray has no call that says whether nodes can still join. `ray up` leaves its file on the head, where
drivers run: as long as the cluster has fewer nodes than the file allows, more may join. KubeRay
leaves an environment variable. Without either, a job that does not fit is refused at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ray
import yaml

from raytrain_opt.clock import monotonic_s
from raytrain_opt.cluster.connection import alive_nodes, free_resources, total_resources
from raytrain_opt.cluster.resources import (
    SLOT_FRACTION,
    WORKER_FRACTION,
    PoolPlan,
    PoolRequest,
    Resources,
    plan_pools,
)
from raytrain_opt.errors import ResourcesError

# A cloud node takes a minute or more to join: no need to look more often. Ray waits whole seconds.
_POLL_S = 5
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
    began_s = released_s = monotonic_s()
    ideal: PoolPlan | None = None  # of an idle cluster
    is_noted, refused = False, ResourcesError("other jobs hold what this one needs.")
    while monotonic_s() - began_s < limit_s:
        settled = monotonic_s() - released_s >= _RELEASE_S
        grows = may_grow(len(alive_nodes()))
        try:
            if ideal is None:
                ideal = plan_pools(request, total_resources())
                # With GPUs that others hold now, `auto` still means these.
                workers = request.workers.model_copy(update={"use_gpu": ideal.use_gpu})
                request = replace(request, workers=workers)
            plan = plan_pools(request, free_resources())
            if settled or plan == ideal:
                return plan
        except ResourcesError as error:
            if ideal is None and not grows:
                raise
            refused = error
            if settled and not is_noted:
                note(f"waiting up to {limit_s:.0f} s (timeouts.start_s) for room: {refused}")
                is_noted = True
        if not (settled and grows):
            time.sleep(_POLL_S if settled else _RELEASE_POLL_S)
        elif _request_nodes(expected_resources(request)):
            released_s = monotonic_s()
    raise ResourcesError(f"{refused} There was no room within {limit_s:.0f} s.")


def may_grow(nodes: int) -> bool:
    """Return whether more nodes may join than the cluster has, as far as the head knows."""
    if os.environ.get(_KUBERAY) == "1":
        return True
    path = _CLUSTER_FILE.expanduser()
    if not path.is_file():
        return False
    cluster = yaml.safe_load(path.read_text(encoding="utf-8"))
    return nodes < 1 + int(cluster.get("max_workers", 0))


def expected_resources(request: PoolRequest) -> list[Resources]:
    """Return what workers and a slot will ask for, as far as it is known before nodes join."""
    workers, device = request.workers, "GPU" if request.workers.use_gpu is True else "CPU"
    if not request.candidates or request.search_on != "slots":
        return [workers.resources or {device: 1.0}] * workers.size
    worker = workers.resources or {device: WORKER_FRACTION}
    return [worker] * workers.size + [request.slots.resources or {device: SLOT_FRACTION}]


def _request_nodes(resources: list[Resources]) -> bool:
    """Make the autoscaler start nodes; return whether there was room for all, which is free then.

    It learns of a placement group, which ends with this process.
    """
    group = ray.util.placement_group(resources)
    try:
        return bool(group.wait(_POLL_S))
    finally:
        ray.util.remove_placement_group(group)
