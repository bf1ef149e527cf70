"""Judge what the nodes reported. Pure: facts in, findings out; and the table of all findings."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from raytrain_opt.commands.doctor.facts import NodeFacts
from raytrain_opt.errors import printable
from raytrain_opt.report.formatting import times

# Larger differences make times in records and logs of several nodes incomparable.
_MAX_CLOCK_SKEW_S = 1.0
# An in-memory data set and a few states of a small model; less than this is soon full.
_MIN_OBJECT_STORE_MIB = 1024
_MIN_EXCHANGE_GIB_PER_S = 0.1  # about a network of 1 Gbit/s
Level = Literal["ok", "warning", "error"]
_STYLES = {"ok": "green", "warning": "yellow", "error": "red"}
_LOG_WIDTH = 120  # columns of the table in a log, which has no width of its own


@dataclass(frozen=True)
class Finding:
    """One line of the table: name of the check, level, result, and what to do about it."""

    check: str
    level: Level
    result: str
    remedy: str = ""


def ok(check: str, result: str) -> Finding:
    """Return a finding that needs no remedy."""
    return Finding(check, "ok", result)


def print_findings(findings: Iterable[Finding]) -> None:
    """Print one table on standard output."""
    console = Console(file=sys.stdout)
    if not console.is_terminal:
        console = Console(file=sys.stdout, width=_LOG_WIDTH)
    table = Table("", "check", "result", "what to do")
    for finding in findings:
        style = _STYLES[finding.level]
        texts = (finding.check, finding.result, finding.remedy)
        cells = (Text(printable(text)) for text in texts)
        table.add_row(Text(finding.level, style=style), *cells)
    console.print(table)


def check_nodes(nodes: Sequence[NodeFacts], start_limit_s: float) -> list[Finding]:
    """Return all findings in the order of the table; the first node is the driver's."""
    return [
        _check_versions(nodes),
        *_check_gpus(nodes),
        *_check_gpu_processes(nodes),
        *_check_storage(nodes),
        *_check_data(nodes),
        _check_clocks(nodes),
        *_check_memory(nodes),
        _check_start_up(nodes, start_limit_s),
    ]


def _check_versions(nodes: Sequence[NodeFacts]) -> Finding:
    packages = nodes[0].versions
    unequal = [
        f"{package} {', '.join(f'{node.versions.get(package)} on {node.host}' for node in nodes)}"
        for package in packages
        if len({node.versions.get(package) for node in nodes}) > 1
    ]
    if unequal:
        remedy = "install constraints.txt on every node; all nodes need the same versions"
        return Finding("versions", "error", "; ".join(unequal), remedy)
    text = ", ".join(f"{name} {number}" for name, number in packages.items())
    return ok("versions", f"{text} on {times(len(nodes), 'node')}")


def _check_gpus(nodes: Sequence[NodeFacts]) -> list[Finding]:
    findings = [
        Finding("GPUs", "error", f"{node.host}: {node.gpu_error}", "check nvidia-smi there")
        for node in nodes
        if node.gpu_error
    ]
    gpu_nodes = [n for n in nodes if (n.gpus or n.ray_gpus) and not n.gpu_error]
    if not gpu_nodes:
        return findings or [ok("GPUs", f"none on {times(len(nodes), 'node')}: training on CPU")]
    findings += map(_check_gpu_count, gpu_nodes)
    if len({node.driver for node in gpu_nodes}) > 1:
        drivers = ", ".join(f"{node.driver} on {node.host}" for node in gpu_nodes)
        remedy = "install the same driver on all nodes: NCCL is tested with equal versions"
        findings.append(Finding("GPU driver", "warning", drivers, remedy))
    return findings


def _check_gpu_count(node: NodeFacts) -> Finding:
    names = ", ".join(sorted({gpu.name for gpu in node.gpus}))
    text = f"{node.host}: {len(node.gpus)} x {names}"
    if node.ray_gpus > len(node.gpus):
        result = f"{node.host}: Ray offers {node.ray_gpus:g} GPUs, NVML sees {len(node.gpus)}"
        remedy = "a driver or a GPU has failed: check nvidia-smi there, then restart Ray"
        return Finding("GPUs", "error", result, remedy)
    if node.ray_gpus < len(node.gpus):
        result = f"{text}, of which Ray offers {node.ray_gpus:g}"
        remedy = "to use all, restart Ray there without CUDA_VISIBLE_DEVICES and --num-gpus"
        return Finding("GPUs", "warning", result, remedy)
    return ok("GPUs", f"{text}, driver {node.driver}")


def _check_gpu_processes(nodes: Sequence[NodeFacts]) -> list[Finding]:
    findings = []
    for node in nodes:
        busy = [
            f"{', '.join(gpu.processes)} ({gpu.used_mib:,} of {gpu.memory_mib:,} MiB) on GPU {i}"
            for i, gpu in enumerate(node.gpus)
            if gpu.processes
        ]
        if busy:
            remedy = "stop them or wait: they take memory and compute time from the training"
            result = f"{node.host}: {'; '.join(busy)}"
            findings.append(Finding("GPU processes", "warning", result, remedy))
    if not findings and any(node.gpus for node in nodes):
        return [ok("GPU processes", "no other process uses the GPUs")]
    return findings


def _check_storage(nodes: Sequence[NodeFacts]) -> list[Finding]:
    driver = nodes[0]
    if driver.storage_error is not None:
        remedy = "give a storage_path that the head can write"
        return [Finding("storage", "error", f"{driver.host}: {driver.storage_error}", remedy)]
    unshared = [
        f"{node.host} {node.storage_error or 'does not see the same files'}"
        for node in nodes[1:]
        if node.storage_error or not (node.sees_storage and node.storage_seen)
    ]
    if unshared:
        remedy = (
            f"only the driver's node ({driver.host}) needs the storage; use shared storage "
            "or a URI for runs that must resume after that node is lost"
        )
        return [Finding("storage", "warning", "; ".join(unshared), remedy)]
    return [ok("storage", f"written and read from {times(len(nodes), 'node')}")]


def _check_data(nodes: Sequence[NodeFacts]) -> list[Finding]:
    remedy = "every worker reads the data itself: put them at the same path on every node"
    return [
        Finding("data", "error", f"{node.host}: {'; '.join(node.data_problems)}", remedy)
        for node in nodes
        if node.data_problems
    ]


def _check_clocks(nodes: Sequence[NodeFacts]) -> Finding:
    worst = max(nodes, key=_min_skew_s)
    if _min_skew_s(worst) > _MAX_CLOCK_SKEW_S:
        result = f"{worst.host} is {_min_skew_s(worst):.1f} s off the clock of {nodes[0].host}"
        remedy = (
            "start chrony or systemd-timesyncd there; until then times in records and logs "
            "disagree"
        )
        return Finding("clocks", "warning", result, remedy)
    uncertainty_s = max(node.clock_uncertainty_s for node in nodes)
    return ok("clocks", f"equal within the {1000 * uncertainty_s:.0f} ms that a message takes")


def _min_skew_s(node: NodeFacts) -> float:
    """Return the smallest clock difference that explains the offset and a message's time."""
    return max(0.0, abs(node.clock_offset_s) - node.clock_uncertainty_s)


def _check_memory(nodes: Sequence[NodeFacts]) -> list[Finding]:
    findings = []
    for node in nodes:
        sizes = f"/dev/shm {node.shm_mib:,} MiB, object store {node.object_store_mib:,} MiB"
        result = f"{node.host}: {sizes}"
        if node.shm_mib < node.object_store_mib:
            remedy = "enlarge /dev/shm (in a container: --shm-size), else Ray uses the disk"
            findings.append(Finding("memory", "warning", result, remedy))
        elif node.object_store_mib < _MIN_OBJECT_STORE_MIB:
            remedy = (
                "in-memory data sets and model states must fit: set ray start "
                "--object-store-memory"
            )
            findings.append(Finding("memory", "warning", result, remedy))
    if findings:
        return findings
    smallest = min(nodes, key=lambda node: node.object_store_mib)
    text = f"object store of at least {smallest.object_store_mib:,} MiB, inside /dev/shm"
    return [ok("memory", text)]


def _check_start_up(nodes: Sequence[NodeFacts], limit_s: float) -> Finding:
    slowest = max(nodes, key=lambda node: node.ready_s)
    result = f"a process with torch imported is ready after {slowest.ready_s:.1f} s"
    # A run starts several processes per node, which share its cores while they import.
    if slowest.ready_s > limit_s / 4:
        remedy = "raise timeouts.start_s, or put the environment on a local disk"
        return Finding("start-up", "warning", f"{result} on {slowest.host}", remedy)
    return ok("start-up", f"{result} on the slowest node")


def check_exchange(workers: int, nodes: int, backend: str, mib: int, duration_s: float) -> Finding:
    """Judge an all-reduce of `mib` MiB over `workers` processes.

    The rate is what each process sends in a ring all-reduce: 2 (n - 1) / n of the data.
    """
    rate = 2 * (workers - 1) / workers * mib / 1024 / duration_s
    result = (
        f"{mib} MiB over {workers} workers on {times(nodes, 'node')} with {backend}: "
        f"{duration_s:.3f} s, {rate:.2f} GiB/s each"
    )
    if nodes > 1 and rate < _MIN_EXCHANGE_GIB_PER_S:
        variable = f"{'NCCL' if backend == 'nccl' else 'GLOO'}_SOCKET_IFNAME"
        remedy = (
            f"select the fast network with {variable} on every node; larger batches need fewer "
            "exchanges"
        )
        return Finding("exchange", "warning", result, remedy)
    return ok("exchange", result)
