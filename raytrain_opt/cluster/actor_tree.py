"""End an actor with everything it started: actors, their processes, their placement groups.

Ray ends the actors that a dead process owned, but keeps the placement groups that they created
until the driver ends. A Ray Train controller may create one until its process is gone, so groups
are removed after the processes, and looked for again until none is left.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import psutil
import ray

from raytrain_opt.clock import monotonic_s
from raytrain_opt.cluster import ray_private

# A killed actor's children are gone within 0.1 s on an idle machine. On one that is overloaded, or
# when a node has failed, Ray takes several seconds to notice.
_LIMIT_S = 20.0
_POLL_S = 0.05
# A process on another node cannot be inspected. A request that it sent just before it was killed
# arrives within milliseconds.
_REMOTE_SETTLE_S = 1.0

_log = logging.getLogger(__name__)


class ActorTree:
    """An actor, the actors it created, and so on recursively.

    Ray's record of each actor's owner gives the tree, so two runs in one driver do not touch each
    other's actors. `pids` are processes of this node.
    """

    def __init__(self, root: Any) -> None:
        self.actor_ids, self.worker_ids = {ray_private.actor_id(root)}, set[str]()
        self.pids = set[int]()
        self.spans_nodes = False
        self.alive()

    def alive(self) -> list[str]:
        """Read Ray's table once more, and return the actors and processes that are alive."""
        records = ray_private.read_actors()
        size = 0
        while size < len(self.actor_ids) + len(self.worker_ids):  # from parent to child
            size = len(self.actor_ids) + len(self.worker_ids)
            for actor in records:
                if actor.owner_worker_id in self.worker_ids:
                    self.actor_ids.add(actor.id)
                if actor.id in self.actor_ids and actor.worker_id:
                    self.worker_ids.add(actor.worker_id)
        actors = [actor for actor in records if actor.id in self.actor_ids]
        this_node = ray.get_runtime_context().get_node_id()
        self.pids |= {actor.pid for actor in actors if actor.pid and actor.node_id == this_node}
        self.spans_nodes |= any(actor.pid and actor.node_id != this_node for actor in actors)
        names = [actor.class_name for actor in actors if not actor.is_dead]
        return names + [f"process {pid}" for pid in sorted(self.pids) if _is_running(pid)]

    def groups(self) -> list[str]:
        """Return the placement groups that actors of the tree have created."""
        groups = ray_private.read_placement_groups()
        return [group for group, creator in groups.items() if creator in self.actor_ids]

    def remove_groups(self) -> None:
        """Give back what the placement groups hold."""
        for group in self.groups():
            ray_private.remove_placement_group_by_id(group)


def end_actor_tree(root: Any, limit_s: float = _LIMIT_S) -> list[str]:
    """End the actor behind this handle with everything it started.

    Returns what is alive after `limit_s` seconds, normally nothing. Does not raise: it runs where
    another error may be on its way to the user.
    """
    tree = ActorTree(root)
    ray.kill(root)
    deadline_s = monotonic_s() + limit_s
    while ((alive := tree.alive()) or tree.groups()) and monotonic_s() < deadline_s:
        if not alive:
            tree.remove_groups()
        time.sleep(_POLL_S)
    if tree.spans_nodes:
        time.sleep(_REMOTE_SETTLE_S)
        alive = tree.alive()
    tree.remove_groups()  # even when a process does not end: the next run needs the resources
    if alive:
        _log.warning("still there %.0f s after the end of a run: %s", limit_s, ", ".join(alive))
    return alive


def wait_for_exit(node_id: str, pid: int, limit_s: float = _LIMIT_S) -> None:
    """Wait until a process that is ending is gone, and its memory free."""
    if node_id != ray.get_runtime_context().get_node_id():
        time.sleep(_REMOTE_SETTLE_S)
        return
    deadline_s = monotonic_s() + limit_s
    while _is_running(pid) and monotonic_s() < deadline_s:
        time.sleep(_POLL_S)


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
