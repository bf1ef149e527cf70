"""Ending an actor with everything it started, against a pretended control service of Ray."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_opt.cluster import actor_tree
from raytrain_opt.cluster.actor_tree import end_actor_tree
from raytrain_opt.cluster.ray_private import ActorRecord

NODE = "node"


@dataclass
class Cluster:
    """Ray's tables. `on_look` happens before each look at the actors."""

    actors: dict[str, ActorRecord] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    looks: int = 0
    removed: list[str] = field(default_factory=list)
    now_s: float = 0.0

    def add(self, name: str, owner: str, pid: int, node: str = NODE) -> None:
        self.actors[name] = ActorRecord(
            name, name, False, f"process of {name}", f"process of {owner}", node, pid
        )
        if node == NODE:
            self.running.add(pid)

    def add_group(self, name: str, creator: str) -> None:
        self.groups[name] = creator

    def end(self, name: str) -> None:
        self.actors[name] = replace(self.actors[name], is_dead=True)

    def read_actors(self) -> list[ActorRecord]:
        self.looks += 1
        self.on_look()
        return list(self.actors.values())

    def on_look(self) -> None: ...

    def remove(self, name: str) -> None:
        self.removed.append(name)
        del self.groups[name]

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    cluster.add("launcher", "driver", 1)
    private = actor_tree.ray_private
    monkeypatch.setattr(private, "read_actors", cluster.read_actors)
    monkeypatch.setattr(private, "read_placement_groups", lambda: dict(cluster.groups))
    monkeypatch.setattr(private, "remove_placement_group_by_id", cluster.remove)
    monkeypatch.setattr(private, "actor_id", lambda handle: handle)
    monkeypatch.setattr(actor_tree, "_is_running", lambda pid: pid in cluster.running)
    monkeypatch.setattr(actor_tree, "monotonic_s", lambda: cluster.now_s)
    monkeypatch.setattr(actor_tree.time, "sleep", cluster.sleep)
    context = SimpleNamespace(get_node_id=lambda: NODE)

    def kill(handle: Any) -> None:
        cluster.end(handle)
        cluster.running.discard(cluster.actors[handle].pid)

    monkeypatch.setattr(actor_tree.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(actor_tree.ray, "kill", kill)
    return cluster


def test_a_group_that_is_created_while_the_controller_dies_is_removed_too(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller answers each loss of its group with a new one, up to its last moment."""
    cluster.add("controller", "launcher", 2)
    cluster.add_group("first", "controller")

    def on_look() -> None:
        if cluster.looks == 4:  # dead to Ray, but its process sends one more request
            cluster.end("controller")
        if cluster.looks == 6:
            cluster.add_group("last", "controller")
            cluster.running.discard(2)

    monkeypatch.setattr(cluster, "on_look", on_look)
    assert not end_actor_tree("launcher")
    assert cluster.groups == {}
    assert cluster.removed == ["first", "last"]
    assert cluster.looks >= 7  # none is removed before the controller and its process are gone


def test_resources_of_another_run_of_this_driver_are_kept(cluster: Cluster) -> None:
    cluster.add("another launcher", "driver", 3)
    cluster.add("another controller", "another launcher", 4)
    cluster.add_group("of another", "another controller")
    cluster.add_group("of the driver", "")
    cluster.add_group("mine", "launcher")
    assert not end_actor_tree("launcher")
    assert cluster.groups.keys() == {"of another", "of the driver"}
    assert not cluster.actors["another controller"].is_dead


def test_a_controller_that_is_seen_only_after_the_launcher_died_belongs_to_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_look() -> None:
        if cluster.looks == 2:
            cluster.add("late", "launcher", 5)
            cluster.end("late")
            cluster.running.discard(5)
            cluster.add_group("late group", "late")

    monkeypatch.setattr(cluster, "on_look", on_look)
    assert not end_actor_tree("launcher")
    assert cluster.removed == ["late group"]


def test_it_does_not_wait_forever_and_still_frees_the_resources(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add("stubborn", "launcher", 6)
    cluster.add_group("held", "stubborn")
    alive = end_actor_tree("launcher", limit_s=2)
    assert alive == ["stubborn", "process 6"]
    assert cluster.groups == {}
    assert 2 <= cluster.now_s < 3
    assert "stubborn, process 6" in caplog.text


def test_on_other_nodes_a_last_request_is_waited_for(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.add("far", "launcher", 7, node="another node")
    cluster.end("far")

    def on_look() -> None:
        if cluster.now_s >= 1:
            cluster.groups.setdefault("far group", "far")

    monkeypatch.setattr(cluster, "on_look", on_look)
    end_actor_tree("launcher")
    assert "far group" in cluster.removed
