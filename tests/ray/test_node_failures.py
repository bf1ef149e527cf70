"""Nodes that leave a Ray cluster while a run trains on them.

Every node here is a raylet of its own on this machine: its processes, its part of the object
store and its resources end with it. The driver is on the head node, which takes no members.
"""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import state as ray_state
from ray.cluster_utils import Cluster
from small_jobs import read_lines, small_job, without_times

from raytrain_opt import Job, run
from raytrain_opt.errors import PoolError
from raytrain_opt.pools.faults import VARIABLE
from raytrain_opt.pools.session import placement_groups
from raytrain_opt.train.checkpoint import read_index

pytestmark = pytest.mark.timeout(1200)


@dataclass
class Machines:
    """The cluster. `seen`: nodes on which the mailbox, the host and the controller were found."""

    cluster: Cluster
    nodes: list[Any] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def add(self, count: int) -> None:
        """Nodes with room for one worker each."""
        for _ in range(count):
            node = self.cluster.add_node(num_cpus=1, resources={"place": 1})
            self.nodes.append(node)

    def fail_one_with_a_worker(self) -> None:
        """As when its power fails: nothing on it gets to say goodbye."""
        self.seen |= at("Mailbox") | at("Host") | at("TrainController")
        workers = at("RayTrainWorker")
        victim = next(node for node in self.nodes if node.node_id in workers)
        self.nodes.remove(victim)
        self.cluster.remove_node(victim, allow_graceful=False)


def at(title: str) -> set[str]:
    """Nodes with living actors of this kind."""
    actors = ray_state.actors().values()
    return {
        actor["Address"]["NodeID"]
        for actor in actors
        if actor["ActorClassName"].startswith(title) and actor["State"] == "ALIVE"
    }


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    head = {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield Machines(cluster)
    ray.shutdown()
    cluster.shutdown()


def a_job(storage: Path, **changes: Any) -> Job:
    place = {"CPU": 0.6, "place": 1}
    workers = {"count": 2, "threads": 1, "resources": place, **changes.pop("workers", {})}
    slots = {"count": 1, "resources": {"CPU": 0.4}}
    return small_job(storage, epochs=4, workers=workers, slots=slots, **changes)


def hang_in(*epochs: int) -> str:
    """So that the main training of these epochs lasts until somebody ends it."""
    fault = {"role": "worker", "index": 1, "phase": "main_train", "step": 4, "action": "hang"}
    return json.dumps([{**fault, "epoch": epoch} for epoch in epochs])


@contextmanager
def a_node_fails_in(machines: Machines, storage: Path, *epochs: int) -> Iterator[None]:
    """In the main training of each of these epochs, which hangs."""
    over = threading.Event()

    def act() -> None:
        for epoch in epochs:
            while not rounds_committed(storage, epoch):
                if over.wait(0.1):
                    return
            machines.fail_one_with_a_worker()

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setenv(VARIABLE, hang_in(*epochs))
        acting = pool.submit(act)
        try:
            yield
        finally:
            over.set()
        acting.result()


def rounds_committed(storage: Path, epoch: int) -> bool:
    """Whether the round of this epoch is committed, and with it the main training under way."""
    commits = [read_index(folder) for folder in storage.glob("*/checkpoints")]
    return any(at and (at[-1].epoch, at[-1].rounds) == (epoch - 1, 1) for at in commits)


@dataclass
class Ended:
    """A run: its directory, how it ended, and the output."""

    folder: str
    error: PoolError | None
    told: str = ""

    def epochs(self) -> list[dict[str, Any]]:
        """Without times."""
        lines = read_lines(self.folder, "epochs")
        for line in lines:
            for name in ("seconds", "samples_per_s", "parts_s"):
                del line[name]
        return lines


@pytest.fixture(scope="module")
def given_up(machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Two nodes, two workers; one node fails in epoch 3, and nothing is there to go on with."""
    storage = tmp_path_factory.mktemp("given_up")
    machines.add(2)
    with a_node_fails_in(machines, storage, 3), pytest.raises(PoolError) as caught:
        run(a_job(storage, limits={"stall_s": 20, "stop_s": 2}))
    (folder,) = storage.iterdir()
    return Ended(str(folder), caught.value)


@pytest.fixture(scope="module")
def shrunk(given_up: Ended, machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Three nodes, two workers; one fails in epoch 2 and another in epoch 3."""
    storage = tmp_path_factory.mktemp("shrunk")
    machines.add(2)
    output = io.StringIO()
    with a_node_fails_in(machines, storage, 2, 3), redirect_stdout(output):
        result = run(a_job(storage, workers={"min_count": 1}))
    return Ended(result.run_dir, None, " ".join(output.getvalue().split()))


def test_without_another_node_the_run_ends_and_says_who_is_missing(given_up: Ended) -> None:
    told = str(given_up.error)
    assert "no progress of MainTrain" in told
    assert "limits.stall_s: 20" in told
    assert re.search(
        r"worker [01] \(pid \d+, \S+ in Ray's session logs; its node \S+ is gone", told
    )
    assert "workers.min_count lets a training go on with fewer" in told
    assert read_index(Path(given_up.folder) / "checkpoints")[-1].reached == "round 1 of epoch 3"
    assert placement_groups() == set()


def test_where_another_node_is_nothing_changes(given_up: Ended, shrunk: Ended) -> None:
    """The epochs and rounds up to the failure without replacement, bit by bit: the digests in
    rounds.jsonl are those of states.
    """
    assert shrunk.epochs()[:2] == given_up.epochs()
    expected, found = (
        without_times(read_lines(ended.folder, "rounds")) for ended in (given_up, shrunk)
    )
    assert found[:2] == expected
    assert shrunk.epochs()[1]["workers"] == 2


def test_where_there_is_none_fewer_workers_go_on_with_the_same_batch(shrunk: Ended) -> None:
    epochs = shrunk.epochs()
    assert [line["workers"] for line in epochs] == [2, 2, 1, 1]
    assert epochs[2]["samples"] == epochs[3]["samples"] == epochs[1]["samples"]
    assert "epoch 3: on 1 of 2 workers; the global batch is the same" in shrunk.told
    rounds = read_lines(shrunk.folder, "rounds")
    assert [len(line["loaded_sha256"]) for line in rounds] == [2, 2, 1, 1]
    assert all(set(line["loaded_sha256"]) == {line["winner_sha256"]} for line in rounds)
    assert epochs[3]["test_accuracy"] > epochs[1]["test_accuracy"] - 0.02


def test_what_cannot_be_started_again_is_on_the_node_of_the_driver(
    shrunk: Ended, machines: Machines
) -> None:
    """So no other node's failure ends a run; its own ends the driver, and the run is resumed."""
    assert machines.seen == {ray.get_runtime_context().get_node_id()}
