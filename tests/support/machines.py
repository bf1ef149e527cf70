"""Nodes that can fail: raylets on this machine, each with room for one worker."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import psutil
from ray.cluster_utils import Cluster

# Resources of a worker: only nodes that are added to a cluster here have places.
PLACE = {"CPU": 0.6, "place": 1.0}


class Machines:
    """Nodes beside the head of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._nodes = cluster, list[Any]()
        self._hung: list[tuple[Any, list[psutil.Process]]] = []

    def add(self, count: int) -> None:
        """Start nodes."""
        for _ in range(count):
            node = self._cluster.add_node(num_cpus=1, resources={"place": 1})
            self._nodes.append(node)

    def end_one_with_a_worker(self, *, hang: bool = False) -> str | None:
        """End a node as a power failure does: nothing on it can report its end.

        `hang`: stop its processes instead; its connections stay open. Returns Ray's identity of
        the node; None if no node has a worker.
        """
        for node in self._nodes:
            processes = _processes(node)
            if any("ray::RayTrainWorker" in _title(process) for process in processes):
                break
        else:
            return None
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
    return [process, *process.children(recursive=True)]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""
