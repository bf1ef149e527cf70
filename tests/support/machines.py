"""Nodes that can fail: raylets on this machine, each with room for one worker."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from typing import Any

import psutil
import ray
from ray._private import state as ray_state
from ray.cluster_utils import Cluster

# Resources of a worker: only nodes that are added to a cluster here have places.
PLACE = {"CPU": 0.6, "place": 1.0}


class Machines:
    """Nodes beside the head of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._nodes = cluster, list[Any]()
        self._hung: list[tuple[Any, list[psutil.Process]]] = []
        self._preempted: Any = None

    def add_up_to(self, count: int) -> None:
        """Start as many nodes as are missing."""
        for _ in range(count - len(self._nodes)):
            node = self._cluster.add_node(num_cpus=1, resources={"place": 1})
            self._nodes.append(node)

    def preempt_one_with_a_worker(self, notice_s: int) -> bool:
        """Give notice that a node will end, as a cloud does; `end_one_with_a_worker` ends it.

        Returns False if no node has a worker.
        """
        self._preempted = self._one_with_a_worker()
        if self._preempted is not None:
            notice = f"--deadline-remaining-seconds={notice_s} --reason-message=spot"
            reason = f"--reason=DRAIN_NODE_REASON_PREEMPTION --node-id={self._preempted.node_id}"
            address = f"--address={self._cluster.address}"
            command = ["ray", "drain-node", address, *reason.split(), *notice.split()]
            subprocess.run(command, check=True, capture_output=True)
        return self._preempted is not None

    def _one_with_a_worker(self) -> Any:
        for node in self._nodes:
            if any("ray::RayTrainWorker" in _title(process) for process in _processes(node)):
                return node
        return None

    def end_one_with_a_worker(self, *, hang: bool = False) -> str | None:
        """End a node as a power failure does: nothing on it can report its end.

        `hang`: stop its processes instead; its connections stay open. Returns Ray's identity of
        the node; None if no node has a worker.
        """
        if (node := self._preempted or self._one_with_a_worker()) is None:
            return None
        self._preempted, processes = None, _processes(node)
        self._nodes.remove(node)
        if hang:
            self._hung.append((node, processes))
            for process in processes:
                process.suspend()
        else:
            self._cluster.remove_node(node, allow_graceful=False)
        return str(node.node_id)

    def remove_all(self) -> None:
        """End all nodes."""
        for node, processes in self._hung:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            node.all_processes["raylet"][0].process.wait()  # no zombie stays
        for node in self._nodes:
            self._cluster.remove_node(node)
        self._nodes.clear()


def _processes(node: Any) -> list[psutil.Process]:
    [raylet] = node.all_processes["raylet"]
    process = psutil.Process(raylet.process.pid)
    return [process, *process.children(recursive=True), *_forks(node)]


def _forks(node: Any) -> list[psutil.Process]:
    """Return the actors of a node, which are forks of another process than its raylet."""
    actors = ray_state.actors().values() if ray.is_initialized() else ()
    here = node.node_id, "ALIVE"
    pids = [a["Pid"] for a in actors if (a["Address"]["NodeID"], a["State"]) == here]
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""
