"""Nodes that leave a Ray cluster while workers of a run are on them, and nodes that come.

Every node here is a separate raylet on this machine: its processes, its part of the object
store and its resources end with it. The driver is on the head node, which takes no workers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import state as ray_state
from ray.cluster_utils import Cluster

from raytrain_opt.clock import monotonic_s
from raytrain_opt.cluster.connection import gone_nodes
from raytrain_opt.errors import PoolError
from raytrain_opt.pools.commands import Evaluate
from tests.support.echo import TRAINED, Done
from tests.support.echo_pools import echo_pools
from tests.support.machines import PLACE, Machines
from tests.support.ray_leftovers import placement_groups

pytestmark = pytest.mark.timeout(900)


def nodes_with(title: str) -> set[str]:
    """Return the nodes with living actors of this class."""
    actors = ray_state.actors().values()
    return {
        actor["Address"]["NodeID"]
        for actor in actors
        if actor["ActorClassName"].startswith(title) and actor["State"] == "ALIVE"
    }


@pytest.fixture(scope="module")
def machines(local_ray: Cluster) -> Iterator[Machines]:
    machines = Machines(local_ray)
    yield machines
    machines.remove_all()


def end_one(machines: Machines, *, hang: bool = False) -> None:
    """End a node with a worker and wait until Ray knows."""
    victim = machines.end_one_with_a_worker(hang=hang)
    deadline_s = monotonic_s() + 120
    while victim not in gone_nodes():
        assert monotonic_s() < deadline_s
        time.sleep(0.1)


def hang_in(*epochs: int) -> list[dict[str, Any]]:
    """Return faults that block both workers in these epochs until a process ends."""
    fault = {"role": "worker", "phase": "main_train", "step": 4, "action": "hang"}
    return [{**fault, "epoch": epoch, "index": index} for epoch in epochs for index in (0, 1)]


def test_another_node_replaces_one_without_it_fewer_continue_and_a_new_one_is_used(
    machines: Machines, tmp_path: Path
) -> None:
    """Actors that cannot restart are on the node of the driver, so only its failure ends a run."""
    machines.add_up_to(3)
    with echo_pools(
        tmp_path, workers=2, min_workers=1, worker_resources=PLACE, faults=hang_in(1, 2)
    ) as echo:
        head = {ray.get_runtime_context().get_node_id()}
        for title in ("Mailbox", "PoolLauncher"):
            assert nodes_with(title) == head
        echo.act_at_work(lambda: end_one(machines))
        first = echo.workers.command(echo.main_train(1))
        assert echo.contents(first) == {0: TRAINED, 1: TRAINED}
        echo.act_at_work(lambda: end_one(machines, hang=True))
        # From a state that was on the node that hangs.
        second = echo.workers.command(replace(echo.main_train(2), state=first[1]))
        assert echo.contents(second) == {0: TRAINED + b", trained"}
        assert echo.workers.alive() == (0,)
        assert nodes_with("TrainController") <= head  # or it is part of the launcher
        assert echo.workers.command(Evaluate(second[0])) == {
            0: Done("evaluate", TRAINED + b", trained")
        }
        echo.workers.grow()  # without room: nothing happens
        assert echo.workers.alive() == (0,)
        restarts = echo.workers.restarts()
        machines.add_up_to(2)
        echo.workers.grow()
        assert echo.workers.alive() == (0, 1)
        third = echo.workers.command(replace(echo.main_train(3), state=second[0]))
        assert echo.contents(third) == dict.fromkeys((0, 1), TRAINED + b", trained" * 2)
        assert echo.workers.restarts() == restarts
    assert placement_groups() == set()


def test_without_a_smaller_count_the_run_ends_and_names_the_missing_worker(
    machines: Machines, tmp_path: Path
) -> None:
    machines.add_up_to(2)
    with echo_pools(
        tmp_path, workers=2, worker_resources=PLACE, faults=hang_in(1), no_progress_s=10
    ) as echo:
        echo.act_at_work(lambda: end_one(machines))
        with pytest.raises(PoolError) as caught:
            echo.workers.command(echo.main_train(1))
    message = str(caught.value)
    assert "no progress of main_train" in message
    assert "timeouts.no_progress_s: 10" in message
    pattern = (
        r"worker [01] \(pid \d+, \S+ in Ray's session logs; its node \S+ is gone, see workers"
    )
    assert re.search(pattern, message)
    assert placement_groups() == set()
