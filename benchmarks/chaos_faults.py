"""How `benchmarks.chaos` disturbs a run: the roles, and the machines that they need."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import ray
from ray.cluster_utils import Cluster

from raytrain_opt.cluster.ray_private import read_placement_groups
from tests.support.machines import Machines
from tests.support.s3_server import Fault, cut, delay, refuse

if TYPE_CHECKING:
    from benchmarks.chaos import Run

# The process titles that Ray sets; the driver is the command itself.
TITLES = {
    "worker": "ray::RayTrainWorker",
    "slot": "ray::ImplicitFunc",
    "mailbox": "ray::Mailbox",
    "launcher": "ray::PoolLauncher",
}
NODE_ROLES = ("node", "hung_node", "preempted_node")
ROLES = (*TITLES, "driver", "sigterm", "connection", "full_disk", "clock", "storage", *NODE_ROLES)
# Of a preemption, as clouds give it.
NOTICE_S = 10
# The longest error of a clock.
CLOCK_ERROR_S = 10 * 86400
# Bytes of the small file system: a run of the quickstart needs a tenth.
SMALL_DISK = 64 * 2**20


@dataclass(frozen=True)
class Nodes:
    """A cluster whose head takes no workers, and nodes of it that do."""

    cluster: Cluster
    machines: Machines

    @property
    def address(self) -> str:
        """Address of the head."""
        return str(self.cluster.address)

    def groups(self) -> int:
        """Return how many placement groups the cluster has."""
        ray.init(self.address, log_to_driver=False, logging_level=logging.ERROR)
        try:
            return len(read_placement_groups())
        finally:
            ray.shutdown()

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[Nodes]:
        """Start a cluster with one node more than a run has workers."""
        head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 2**28}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        machines = Machines(cluster)
        try:
            machines.add_up_to(3)
            yield cls(cluster, machines)
        finally:
            machines.remove_all()
            cluster.shutdown()  # type: ignore[no-untyped-call]


def disturb_once(run: Run, command: subprocess.Popen[bytes], chance: random.Random) -> bool:
    """Disturb the run once, by its role; return whether there was something to disturb."""
    role = run.outcome.role
    if role == "clock":
        run.clock_error_s = chance.uniform(-CLOCK_ERROR_S, CLOCK_ERROR_S)
    if role == "full_disk":
        with suppress(OSError), run.ballast.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    elif role in ("driver", "sigterm", "clock"):
        command.send_signal(signal.SIGTERM if role == "sigterm" else signal.SIGKILL)
        command.wait()
    elif role == "storage":
        assert run.server is not None
        # More refusals than a request is repeated, cut connections, and an answer too late.
        faults: list[list[Fault]] = [[refuse("SlowDown")] * 30, [cut] * 10, [delay(40.0)]]
        run.server.applies_to = lambda request: request.method == "PUT"
        run.server.faults.extend(chance.choice(faults))
    elif role in NODE_ROLES:
        assert run.nodes is not None
        hang = role == "hung_node"
        return run.nodes.machines.end_one_with_a_worker(hang=hang) is not None
    elif role == "connection":
        return _cut_connection(run.processes(), chance)
    else:
        processes = [p for p in run.processes() if TITLES[role] in " ".join(p.cmdline())]
        if not processes:
            return False
        os.kill(chance.choice(processes).pid, signal.SIGKILL)
    return True


def _cut_connection(processes: Sequence[psutil.Process], chance: random.Random) -> bool:
    """Cut a TCP connection between two of the processes; return whether there was one."""
    connections = []
    for process in processes:
        with suppress(psutil.Error):
            connections += process.net_connections("tcp")
    ports = {c.laddr.port for c in connections}
    inner = [
        (c.laddr.port, c.raddr.port)
        for c in connections
        if c.status == psutil.CONN_ESTABLISHED and c.raddr.port in ports
    ]
    if not inner:
        return False
    local, remote = chance.choice(inner)
    command = ["ss", "-K", "-t", "-n", f"sport = :{local} and dport = :{remote}"]
    cut_sockets = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return f":{local}" in cut_sockets


@contextmanager
def new_folder(folder: Path, *, small: bool = False) -> Iterator[Path]:
    """Make a folder, on request in a small file system of its own."""
    folder.mkdir()
    if not small:
        yield folder
        return
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "chaos", str(folder)]
    subprocess.run(mount, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
