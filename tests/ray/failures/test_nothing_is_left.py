"""Ending a run while its controller retries, on a real Ray: nothing of the run stays.

No torch in these processes: a repetition costs the start of one or two bare Python processes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import ray

from raytrain_opt.cluster.actor_tree import ActorTree, end_actor_tree
from raytrain_opt.cluster.ray_private import without_idle_actors
from tests.support.ray_leftovers import placement_groups

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(900)]

REPETITIONS = 8


class Controller:
    """Holds half a CPU, and asks for it anew the moment it is taken away, as Ray Train's
    controller does whose workers died.
    """

    def run(self) -> None:
        while True:
            group = ray.util.placement_group([{"CPU": 0.5}])
            while ray.util.placement_group_table(group)["state"] != "REMOVED":
                time.sleep(0.001)


class Launcher:
    """Keeps a controller of Ray Train whose training function always fails."""

    def run(self, storage: str) -> None:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

        trainer = DataParallelTrainer(
            fail,
            scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 0.5}),
            run_config=RunConfig(
                name=f"failing-{time.time_ns()}",
                storage_path=storage,
                failure_config=FailureConfig(max_failures=-1),
            ),
        )
        without_idle_actors(trainer).fit()


def fail() -> None:
    raise RuntimeError("planted failure")


def wait_for_groups(tree: ActorTree, limit_s: float = 120) -> None:
    """Until the tree holds a placement group."""
    deadline_s = time.monotonic() + limit_s
    while tree.alive() and not tree.groups():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def wait_for_end(tree: ActorTree, limit_s: float = 20) -> None:
    """Until no process is left. A worker whose actor died before the end may still be ending."""
    deadline_s = time.monotonic() + limit_s
    while left := tree.alive():
        assert time.monotonic() < deadline_s, str(left)
        time.sleep(0.05)


def wait_for_all_cpus(limit_s: float = 20) -> None:
    """Until no CPU is taken. The head node hears of what a node gave back up to 0.1 s later."""
    deadline_s = time.monotonic() + limit_s
    while (cpus := ray.available_resources().get("CPU")) != 2:
        assert time.monotonic() < deadline_s, f"{cpus} of 2 CPUs are free"
        time.sleep(0.05)


def start(actor_class: type[Any], *arguments: Any) -> Any:
    actor = ray.remote(num_cpus=0)(actor_class).remote()
    actor.run.remote(*arguments)
    return actor


def test_a_controller_that_asks_for_its_resources_again_gets_none() -> None:
    """Runs in one driver, one after the other, each ended in the middle of a retry."""
    for _ in range(REPETITIONS):
        controller = start(Controller)
        wait_for_groups(ActorTree(controller))
        assert not end_actor_tree(controller)
        assert placement_groups() == set()
    wait_for_all_cpus()


def test_ray_trains_own_controller_leaves_nothing_while_it_restarts_its_workers(
    tmp_path: Path,
) -> None:
    """Once: it imports Ray Train in four processes."""
    launcher = start(Launcher, str(tmp_path))
    tree = ActorTree(launcher)
    wait_for_groups(tree)
    assert not end_actor_tree(launcher)
    assert placement_groups() == set()
    wait_for_end(tree)
    wait_for_all_cpus()
