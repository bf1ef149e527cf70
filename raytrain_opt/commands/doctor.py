"""`raytrain-opt doctor`: find what would go wrong on a cluster before paying for a run.

An actor on every node reports `NodeFacts`, `check_nodes` judges them (facts in, findings out), and
processes like the job's workers time an all-reduce. `diagnose` prints one table of all findings.
"""

from __future__ import annotations

import socket
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal
from uuid import uuid4

import ray
from ray.exceptions import GetTimeoutError, RayError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raytrain_opt import storage
from raytrain_opt.clock import monotonic_s
from raytrain_opt.cluster.connection import (
    alive_nodes,
    check_address,
    ray_session,
    total_resources,
)
from raytrain_opt.cluster.resources import PoolPlan, plan_pools
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import JobError, Problem, ResourcesError, StorageError, printable
from raytrain_opt.execution.check import check_data, check_job
from raytrain_opt.monitoring import gpu_names
from raytrain_opt.recording.recorder import versions
from raytrain_opt.report.plots import times

Level = Literal["ok", "warning", "error"]
_STYLES = {"ok": "green", "warning": "yellow", "error": "red"}
_LOG_WIDTH = 120  # columns of the table in a log, which has no width of its own

# The defaults of the job file, used without a job.
_STORAGE_PATH, _START_S = "runs", 600.0
# About the gradients of a ResNet-18 in fp32; the median of five hides one slow repetition.
_MIB, _REPEATS = 32, 5
# Long enough for imports of torch on a slow disk, short for a user who waits.
_EXCHANGE_LIMIT_S = 120.0
_MIN_GB_PER_S = 0.1  # about a network of 1 Gbit/s


@dataclass(frozen=True)
class Finding:
    """One line of the table: name of the check, level, result, and what to do about it."""

    check: str
    level: Level
    result: str
    remedy: str = ""


def diagnose(job: Job | None, address: str | None) -> int:
    """Print the findings on the cluster at `address`; return 1 if one is an error, else 0."""
    try:
        check_address(address)
        with ray_session(address, verbose=False) as owned:
            findings = _check_cluster(job, owned)
    except JobError as error:
        result = "; ".join(str(problem) for problem in error.problems)
        remedy = "start the cluster, or give the head's address and token"
        findings = [Finding("Ray", "error", result, remedy)]
    print_findings(findings)
    return int(any(finding.level == "error" for finding in findings))


def print_findings(findings: Iterable[Finding]) -> None:
    """Print one table on standard output."""
    console = Console(file=sys.stdout)
    if not console.is_terminal:
        console = Console(file=sys.stdout, width=_LOG_WIDTH)
    table = Table("", "check", "result", "what to do")
    for finding in findings:
        texts = (finding.check, finding.result, finding.remedy)
        cells = (Text(printable(text)) for text in texts)
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), *cells)
    console.print(table)


def _check_cluster(job: Job | None, owned: bool) -> list[Finding]:
    result = f"connected to {times(len(alive_nodes()), 'node')}; the token, if any, is accepted"
    if owned:
        result = "no cluster was given: Ray was started on this machine for the checks"
    findings = [Finding("Ray", "ok", result)]
    if job is not None:  # what a run would refuse before anything starts
        problems = [
            Finding("job", "error", str(p), "correct the job file") for p in check_job(job)
        ]
        findings += problems or [Finding("job", "ok", "its names, functions and files are valid")]
    path = _STORAGE_PATH if job is None else job.storage_path
    file = f".doctor-{uuid4().hex[:8]}"
    try:
        storage.write(path, file, b"written by raytrain-opt doctor")
        try:
            nodes, failures = _ask_nodes(job, path, file)
        finally:
            storage.remove(path, file)
    except StorageError as error:
        return [
            *findings,
            Finding("storage", "error", str(error), "give a storage_path that the head can write"),
        ]
    if failures:
        return [*findings, *failures]
    room, plan = _check_room(job)
    if plan is None:  # no job, or none that fits: one process on each node
        exchange = _check_exchange(len(nodes), {"CPU": 0.001}, use_gpu=False)
    else:
        exchange = _check_exchange(plan.workers, plan.worker_resources, plan.use_gpu)
    return [*findings, *check_nodes(nodes), *room, exchange]


@dataclass(frozen=True)
class NodeFacts:
    """What one node reports."""

    host: str
    versions: dict[str, str]  # by package
    gpus: tuple[str, ...] = ()  # their names
    gpu_error: str | None = None
    data_problems: tuple[str, ...] = ()
    storage_error: str | None = None  # why it does not see the file that the driver wrote
    ray_gpus: float = 0.0  # that Ray offers


class NodeInspector:
    """An actor on one node."""

    def facts(self, job: Job | None, storage_path: str, file: str) -> NodeFacts:
        """Return what the node itself knows. Imports torch, as the processes of a run do."""
        import torch  # noqa: F401

        gpus, gpu_error, storage_error, problems = list[str](), None, None, list[Problem]()
        try:
            gpus = gpu_names()
        except ResourcesError as error:
            gpu_error = str(error)
        try:
            if storage.read(storage_path, file) is None:
                storage_error = "does not see the same files"
        except StorageError as error:
            storage_error = str(error)
        # Each worker and slot reads these data itself; the driver reads the in-memory sets.
        if job is not None and job.data.on_nodes:
            problems = check_data(job.data)
        return NodeFacts(
            socket.gethostname(),
            versions(),
            tuple(gpus),
            gpu_error,
            tuple(map(str, problems)),
            storage_error,
        )


def _ask_nodes(
    job: Job | None, storage_path: str, file: str
) -> tuple[list[NodeFacts], list[Finding]]:
    """Return the facts of all nodes, the driver's first, and a finding for each that is silent."""
    driver_id = ray.get_runtime_context().get_node_id()
    nodes = sorted(alive_nodes(), key=lambda node: node["NodeID"] != driver_id)
    end_s = monotonic_s() + (_START_S if job is None else job.timeouts.start_s)
    remote: Any = ray.remote(NodeInspector)
    labels = [{"ray.io/node-id": node["NodeID"]} for node in nodes]
    inspectors = [remote.options(num_cpus=0, label_selector=label).remote() for label in labels]
    facts, failures = [], []
    try:
        pending = [inspector.facts.remote(job, storage_path, file) for inspector in inspectors]
        for node, reply in zip(nodes, pending, strict=True):
            try:
                reported: NodeFacts = ray.get(reply, timeout=max(0.0, end_s - monotonic_s()))
                facts.append(replace(reported, ray_gpus=node["Resources"].get("GPU", 0.0)))
            except (GetTimeoutError, RayError) as error:
                failures.append(_silent_node(node["NodeManagerHostname"], error))
        return facts, failures
    finally:
        for inspector in inspectors:
            ray.kill(inspector)


def _silent_node(host: str, error: Exception) -> Finding:
    result = f"{host}: no process of this package starts and answers there: {_last_line(error)}"
    remedy = "install constraints.txt and this package on it; its logs are below /tmp/ray"
    return Finding("start-up", "error", result, remedy)


def _last_line(error: Exception) -> str:
    """Return the last line of an error of Ray, where it names the remote exception."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def check_nodes(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Return all findings in the order of the table; the first node is the driver's."""
    checks = (_check_versions, _check_gpus, _check_storage, _check_data)
    return [finding for check in checks for finding in check(nodes)]


def _check_versions(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    packages = nodes[0].versions
    unequal = [
        f"{package} {', '.join(f'{node.versions.get(package)} on {node.host}' for node in nodes)}"
        for package in packages
        if len({node.versions.get(package) for node in nodes}) > 1
    ]
    if unequal:
        remedy = "install constraints.txt on every node; all nodes need the same versions"
        yield Finding("versions", "error", "; ".join(unequal), remedy)
    else:
        text = ", ".join(f"{name} {number}" for name, number in packages.items())
        yield Finding("versions", "ok", f"{text} on {times(len(nodes), 'node')}")


def _check_gpus(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Compare what NVML sees with what Ray offers."""
    if not any(node.gpus or node.ray_gpus or node.gpu_error for node in nodes):
        yield Finding("GPUs", "ok", f"none on {times(len(nodes), 'node')}: training on CPU")
    for node in nodes:
        text = f"{node.host}: {len(node.gpus)} x {', '.join(sorted({*node.gpus}))}"
        if node.gpu_error:
            result = f"{node.host}: {node.gpu_error}"
            yield Finding("GPUs", "error", result, "check nvidia-smi there")
        elif node.ray_gpus > len(node.gpus):
            result = f"{node.host}: Ray offers {node.ray_gpus:g} GPUs, NVML sees {len(node.gpus)}"
            remedy = "a driver or a GPU has failed: check nvidia-smi there, then restart Ray"
            yield Finding("GPUs", "error", result, remedy)
        elif node.ray_gpus < len(node.gpus):
            result = f"{text}, of which Ray offers {node.ray_gpus:g}"
            remedy = "to use all, restart Ray there without CUDA_VISIBLE_DEVICES and --num-gpus"
            yield Finding("GPUs", "warning", result, remedy)
        elif node.gpus:
            yield Finding("GPUs", "ok", text)


def _check_storage(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    unshared = [f"{node.host} {node.storage_error}" for node in nodes if node.storage_error]
    if unshared:
        remedy = (
            f"only the driver's node ({nodes[0].host}) needs the storage; use shared storage "
            "or a URI for runs that must resume after that node is lost"
        )
        yield Finding("storage", "warning", "; ".join(unshared), remedy)
    else:
        yield Finding("storage", "ok", f"read from {times(len(nodes), 'node')}")


def _check_data(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    remedy = "every worker reads the data itself: put them at the same path on every node"
    for node in nodes:
        if node.data_problems:
            result = f"{node.host}: {'; '.join(node.data_problems)}"
            yield Finding("data", "error", result, remedy)


def _check_room(job: Job | None) -> tuple[list[Finding], PoolPlan | None]:
    if job is None:
        return [], None
    try:
        plan = plan_pools(job, job.learning_rate.max_candidates, total_resources())
    except ResourcesError as error:
        remedy = (
            "change the job as described; if the cluster adds nodes automatically, a run waits "
            "for them until timeouts.start_s"
        )
        return [Finding("room", "error", str(error), remedy)], None
    result = f"{plan.workers} workers and {plan.slots} slots fit"
    return [Finding("room", "ok", "; ".join((result, *plan.notes)))], plan


def _check_exchange(count: int, resources: dict[str, float], use_gpu: bool) -> Finding:
    """Time the exchange of `count` processes with a worker's resources."""
    if count < 2:
        return Finding("exchange", "ok", "not needed with one worker")
    from raytrain_opt.pools.process_group import backend_of  # which imports torch

    backend = backend_of(use_gpu=use_gpu)
    try:
        nodes, duration_s = _time_exchange(count, resources, backend)
    except (GetTimeoutError, RayError) as error:
        remedy = (
            "open all TCP ports between the nodes; /etc/hosts must not map a host name to "
            "127.0.1.1; with several networks select one: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
        )
        result = f"{count} workers could not exchange data with {backend}: {_last_line(error)}"
        return Finding("exchange", "error", result, remedy)
    return judge_exchange(count, nodes, backend, duration_s)


def judge_exchange(workers: int, nodes: int, backend: str, duration_s: float) -> Finding:
    """Judge the seconds of an all-reduce, as a ring: each process sends 2 (n - 1) / n of it."""
    gb_per_s = 2 * (workers - 1) / workers * _MIB * 2**20 / 1e9 / duration_s
    result = (
        f"{_MIB} MiB over {workers} workers on {times(nodes, 'node')} with {backend}: "
        f"{duration_s:.3f} s ({gb_per_s:.2g} GB/s)"
    )
    if nodes > 1 and gb_per_s < _MIN_GB_PER_S:
        variable = f"{'NCCL' if backend == 'nccl' else 'GLOO'}_SOCKET_IFNAME"
        remedy = (
            f"select the fast network with {variable} on every node; larger batches need fewer "
            "exchanges"
        )
        return Finding("exchange", "warning", result, remedy)
    return Finding("exchange", "ok", result)


def _time_exchange(count: int, resources: dict[str, float], backend: str) -> tuple[int, float]:
    """Return the number of nodes of the processes, and the seconds of the slowest one."""
    other = {k: v for k, v in resources.items() if k not in ("CPU", "GPU", "memory")}
    remote: Any = ray.remote(_Rank)
    remote = remote.options(
        num_cpus=resources.get("CPU", 0),
        num_gpus=resources.get("GPU", 0),
        memory=resources.get("memory"),
        resources=other,
        scheduling_strategy="SPREAD",
    )
    ranks = [remote.remote() for _ in range(count)]
    try:
        places = ray.get([rank.place.remote() for rank in ranks], timeout=_EXCHANGE_LIMIT_S)
        pending = [
            rank.all_reduce.remote(backend, places[0][1], i, count) for i, rank in enumerate(ranks)
        ]
        durations_s = ray.get(pending, timeout=_EXCHANGE_LIMIT_S)
    finally:
        for rank in ranks:
            ray.kill(rank)
    return len({node for node, _ in places}), max(durations_s)


class _Rank:
    """One process of the group."""

    def place(self) -> tuple[str, str]:
        """Return the node, and an address where the group can meet: a port that is free now."""
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        with socket.socket() as probe:
            probe.bind((address, 0))
            url = f"tcp://{address}:{probe.getsockname()[1]}"
        return str(ray.get_runtime_context().get_node_id()), url

    def all_reduce(self, backend: str, url: str, rank: int, count: int) -> float:
        """Return the median seconds of an all-reduce."""
        import torch
        import torch.distributed as dist

        device = torch.device("cuda" if backend == "nccl" else "cpu")
        limit = timedelta(seconds=_EXCHANGE_LIMIT_S / 2)
        dist.init_process_group(
            backend, init_method=url, rank=rank, world_size=count, timeout=limit
        )
        data: Any = torch.ones(_MIB * 2**20 // 4, device=device)
        durations_s = []
        for _ in range(_REPEATS + 1):  # the first one opens the connections
            start_s = time.monotonic()
            dist.all_reduce(data)
            float(data[0])  # waits for the device
            durations_s.append(time.monotonic() - start_s)
        dist.destroy_process_group()
        return statistics.median(durations_s[1:])
