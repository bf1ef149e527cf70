"""Nodes that leave a Ray cluster while a run trains on them.

Every node here is a separate raylet on this machine: its processes, its part of the object
store and its resources end with it. The driver is on the head node, which takes no workers.
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

from raytrain_opt import Job, run
from raytrain_opt.errors import PoolError
from raytrain_opt.pools.faults import VARIABLE
from raytrain_opt.train.checkpoint import read_index
from tests.support.ray_leftovers import placement_groups
from tests.support.small_jobs import read_lines, small_job, without_times

pytestmark = pytest.mark.timeout(1200)


@dataclass
class Machines:
    """The cluster. `service_nodes`: nodes on which mailbox, launcher or controller ran."""

    cluster: Cluster
    nodes: list[Any] = field(default_factory=list)
    service_nodes: set[str] = field(default_factory=set)

    def add(self, count: int) -> None:
        """Add nodes with room for one worker each."""
        for _ in range(count):
            node = self.cluster.add_node(num_cpus=1, resources={"place": 1})
            self.nodes.append(node)

    def fail_one_with_a_worker(self) -> None:
        """End a node as a power failure does: nothing on it can report its end."""
        self.service_nodes |= (
            nodes_with("Mailbox") | nodes_with("PoolLauncher") | nodes_with("TrainController")
        )
        workers = nodes_with("RayTrainWorker")
        victim = next(node for node in self.nodes if node.node_id in workers)
        self.nodes.remove(victim)
        self.cluster.remove_node(victim, allow_graceful=False)


def nodes_with(title: str) -> set[str]:
    """Return the nodes with living actors of this class."""
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


def make_job(storage: Path, **changes: Any) -> Job:
    place = {"CPU": 0.6, "place": 1}
    workers = {"count": 2, "threads": 1, "resources": place, **changes.pop("workers", {})}
    slots = {"count": 1, "resources": {"CPU": 0.4}}
    return small_job(storage, epochs=4, workers=workers, slots=slots, **changes)


def hang_in(*epochs: int) -> str:
    """Return faults that block the main training of these epochs until a process ends."""
    fault = {"role": "worker", "index": 1, "phase": "main_train", "step": 4, "action": "hang"}
    return json.dumps([{**fault, "epoch": epoch} for epoch in epochs])


@contextmanager
def a_node_fails_in(machines: Machines, storage: Path, *epochs: int) -> Iterator[None]:
    """Fail a node in the main training of each of these epochs, which hangs."""
    over = threading.Event()

    def act() -> None:
        for epoch in epochs:
            while not has_round_checkpoint(storage, epoch):
                if over.wait(0.1):
                    return
            machines.fail_one_with_a_worker()

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setenv(VARIABLE, hang_in(*epochs))
        failing = pool.submit(act)
        try:
            yield
        finally:
            over.set()
        failing.result()


def has_round_checkpoint(storage: Path, epoch: int) -> bool:
    """Return whether the round of this epoch is saved, so that the main training is running."""
    indices = [read_index(folder) for folder in storage.glob("*/checkpoints")]
    return any(c and (c[-1].epoch, c[-1].rounds) == (epoch - 1, 1) for c in indices)


@dataclass
class Ended:
    """A run: its directory, how it ended, and the output."""

    folder: str
    error: PoolError | None
    output: str = ""

    def epochs(self) -> list[dict[str, Any]]:
        """Return the epoch records without times."""
        lines = read_lines(self.folder, "epochs")
        for line in lines:
            for name in ("duration_s", "samples_per_s", "timings_s"):
                del line[name]
        return lines


@pytest.fixture(scope="module")
def given_up(machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Two nodes, two workers; one node fails in epoch 3, and there is no other node."""
    storage = tmp_path_factory.mktemp("given_up")
    machines.add(2)
    with a_node_fails_in(machines, storage, 3), pytest.raises(PoolError) as caught:
        run(make_job(storage, timeouts={"no_progress_s": 20, "stop_s": 2}))
    (folder,) = storage.iterdir()
    return Ended(str(folder), caught.value)


@pytest.fixture(scope="module")
def shrunk(given_up: Ended, machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Three nodes, two workers; one fails in epoch 2 and another in epoch 3."""
    storage = tmp_path_factory.mktemp("shrunk")
    machines.add(2)
    output = io.StringIO()
    with a_node_fails_in(machines, storage, 2, 3), redirect_stdout(output):
        result = run(make_job(storage, workers={"min_count": 1}))
    return Ended(result.run_dir, None, " ".join(output.getvalue().split()))


def test_without_min_count_the_run_ends_and_names_the_missing_worker(given_up: Ended) -> None:
    message = str(given_up.error)
    assert "no progress of main_train" in message
    assert "timeouts.no_progress_s: 20" in message
    assert re.search(
        r"worker [01] \(pid \d+, \S+ in Ray's session logs; its node \S+ is gone", message
    )
    assert "workers.min_count lets a training continue with fewer" in message
    assert read_index(Path(given_up.folder) / "checkpoints")[-1].reached == "round 1 of epoch 3"
    assert placement_groups() == set()


def test_with_another_node_nothing_changes(given_up: Ended, shrunk: Ended) -> None:
    """Up to the failure without replacement, epochs, rounds and state digests are equal."""
    assert shrunk.epochs()[:2] == given_up.epochs()
    expected, rounds = (
        without_times(read_lines(ended.folder, "rounds")) for ended in (given_up, shrunk)
    )
    assert rounds[:2] == expected
    assert shrunk.epochs()[1]["workers"] == 2


def test_without_another_node_fewer_workers_continue_with_the_same_batch(shrunk: Ended) -> None:
    epochs = shrunk.epochs()
    assert [line["workers"] for line in epochs] == [2, 2, 1, 1]
    assert epochs[2]["samples"] == epochs[3]["samples"] == epochs[1]["samples"]
    assert "epoch 3: running on 1 of 2 workers; global batch size unchanged" in shrunk.output
    rounds = read_lines(shrunk.folder, "rounds")
    assert [len(line["loaded_sha256"]) for line in rounds] == [2, 2, 1, 1]
    assert all(set(line["loaded_sha256"]) == {line["winner_sha256"]} for line in rounds)
    assert epochs[3]["test_accuracy"] > epochs[1]["test_accuracy"] - 0.02


def test_actors_that_cannot_restart_are_on_the_node_of_the_driver(
    shrunk: Ended, machines: Machines
) -> None:
    """So only the failure of the driver's own node ends a run, which can be resumed."""
    assert machines.service_nodes == {ray.get_runtime_context().get_node_id()}
