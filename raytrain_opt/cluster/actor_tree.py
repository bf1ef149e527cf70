"""End an actor with everything it started: actors, their processes, their placement groups.

Ray ends the actors that a dead process owned, but keeps the placement groups that they created
until the driver ends. A Ray Train controller may create one at any moment of a restart, also after
a first look found none. So the order matters: first the actors are gone, then their processes,
then the groups that they created are removed, and the table is read again until none is left.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Leftovers:
    """What is left of a tree: class names of actors, process ids, placement groups."""

    actors: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()
    placement_groups: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.actors or self.pids or self.placement_groups)


class ActorTree:
    """An actor, the actors it created, and so on recursively.

    Ray's record of each actor's owner gives the tree, so two runs in one driver do not touch each
    other's actors. `pids` are processes of this node.
    """

    def __init__(self, root: Any) -> None:
        self.actor_ids, self.worker_ids = {ray_private.actor_id(root)}, set[str]()
        self.pids = set[int]()
        self.spans_nodes = False
        self.leftovers()

    def leftovers(self) -> Leftovers:
        """Read Ray's tables once more, and return what of the tree is alive."""
        actors = self._members()
        alive = tuple(actor.class_name for actor in actors if not actor.is_dead)
        groups = tuple(
            group.id
            for group in ray_private.read_placement_groups()
            if group.creator_actor_id in self.actor_ids
        )
        return Leftovers(alive, tuple(filter(_is_running, sorted(self.pids))), groups)

    def _members(self) -> list[ray_private.ActorRecord]:
        """Return the records of the tree's actors, found from parent to child."""
        records = ray_private.read_actors()
        this_node = ray.get_runtime_context().get_node_id()
        size = 0
        while size < len(self.actor_ids) + len(self.worker_ids):
            size = len(self.actor_ids) + len(self.worker_ids)
            for record in records:
                if record.owner_worker_id in self.worker_ids:
                    self.actor_ids.add(record.id)
                if record.id in self.actor_ids and record.worker_id:
                    self.worker_ids.add(record.worker_id)
        actors = [record for record in records if record.id in self.actor_ids]
        for actor in actors:
            if actor.pid and actor.node_id == this_node:
                self.pids.add(actor.pid)
            elif actor.pid:
                self.spans_nodes = True
        return actors


def end_actor_tree(root: Any, limit_s: float = _LIMIT_S) -> Leftovers:
    """End the actor behind this handle with everything it started.

    Returns what is left after `limit_s` seconds, normally nothing. Does not raise: it runs where
    another error may be on its way to the user.
    """
    tree = ActorTree(root)
    ray.kill(root)
    deadline_s = monotonic_s() + limit_s
    while (leftovers := tree.leftovers()) and monotonic_s() < deadline_s:
        if not leftovers.actors and not leftovers.pids:
            _remove(leftovers)
        time.sleep(_POLL_S)
    if tree.spans_nodes:
        time.sleep(_REMOTE_SETTLE_S)
        leftovers = tree.leftovers()
    _remove(leftovers)  # even when a process does not end: the next run needs the resources
    if leftovers.actors or leftovers.pids:
        _log.warning(
            "still there %.0f s after the end of a run: actors %s; processes %s",
            limit_s,
            ", ".join(leftovers.actors),
            leftovers.pids,
        )
    return leftovers


def wait_for_exit(node_id: str, pid: int, limit_s: float = _LIMIT_S) -> None:
    """Wait until a process that is ending is gone, and its memory free."""
    if node_id != ray.get_runtime_context().get_node_id():
        time.sleep(_REMOTE_SETTLE_S)
        return
    deadline_s = monotonic_s() + limit_s
    while _is_running(pid) and monotonic_s() < deadline_s:
        time.sleep(_POLL_S)


def _remove(leftovers: Leftovers) -> None:
    for group in leftovers.placement_groups:
        ray_private.remove_placement_group_by_id(group)


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
