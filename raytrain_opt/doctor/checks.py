"""Judgements on what the nodes told. Pure: facts in, findings out."""

from __future__ import annotations

from collections.abc import Sequence

from raytrain_opt.doctor.facts import NodeFacts
from raytrain_opt.doctor.finding import Finding, ok

_CLOCK_LIMIT_S = 1.0
_SMALL_SHM_MIB = 1024
_SLOW_GIB_PER_S = 0.1  # about a network of 1 Gbit/s


def check_nodes(nodes: Sequence[NodeFacts], start_limit_s: float) -> list[Finding]:
    """Every check of the nodes, in the order of the table; the driver's node is the first."""
    return [
        _versions(nodes),
        *_gpus(nodes),
        *_foreign_processes(nodes),
        *_storage(nodes),
        *_data(nodes),
        _clocks(nodes),
        *_memory(nodes),
        _start_up(nodes, start_limit_s),
    ]


def _versions(nodes: Sequence[NodeFacts]) -> Finding:
    packages = nodes[0].versions
    unequal = [
        f"{package} {', '.join(f'{node.versions.get(package)} on {node.host}' for node in nodes)}"
        for package in packages
        if len({node.versions.get(package) for node in nodes}) > 1
    ]
    if unequal:
        remedy = "install constraints.txt on every node; processes of other versions do not mix"
        return Finding("versions", "error", "; ".join(unequal), remedy)
    text = ", ".join(f"{name} {number}" for name, number in packages.items())
    return ok("versions", f"{text} on {_count(nodes)}")


def _gpus(nodes: Sequence[NodeFacts]) -> list[Finding]:
    with_gpus = [node for node in nodes if node.gpus or node.ray_gpus]
    if not with_gpus:
        return [ok("GPUs", f"none on {_count(nodes)}: training on CPU")]
    findings = [found for node in with_gpus if (found := _gpus_of(node)) is not None]
    drivers = {node.driver for node in with_gpus}
    if len(drivers) > 1:
        each = ", ".join(f"{node.driver} on {node.host}" for node in with_gpus)
        remedy = "use one driver version: NCCL is tested with equal ones"
        findings.append(Finding("GPU driver", "warning", each, remedy))
    return findings


def _gpus_of(node: NodeFacts) -> Finding:
    seen = f"{node.host}: {len(node.gpus)} x {', '.join(sorted({g.name for g in node.gpus}))}"
    if node.ray_gpus > len(node.gpus):
        what = f"{node.host}: Ray offers {node.ray_gpus:g} GPUs, NVML sees {len(node.gpus)}"
        remedy = "look at nvidia-smi there: a driver or a GPU has failed; start Ray again"
        return Finding("GPUs", "error", what, remedy)
    if node.ray_gpus < len(node.gpus):
        what = f"{seen}, of which Ray offers {node.ray_gpus:g}"
        remedy = "start Ray there again, without CUDA_VISIBLE_DEVICES and --num-gpus, to use all"
        return Finding("GPUs", "warning", what, remedy)
    return ok("GPUs", f"{seen}, driver {node.driver}")


def _foreign_processes(nodes: Sequence[NodeFacts]) -> list[Finding]:
    findings = []
    for node in nodes:
        busy = [
            f"{', '.join(gpu.processes)} ({gpu.used_mib:,} of {gpu.memory_mib:,} MiB) on GPU {i}"
            for i, gpu in enumerate(node.gpus)
            if gpu.processes
        ]
        if busy:
            remedy = "end them, or wait: they take memory and time from the training"
            what = f"{node.host}: {'; '.join(busy)}"
            findings.append(Finding("GPU processes", "warning", what, remedy))
    if not findings and any(node.gpus for node in nodes):
        return [ok("GPU processes", "no others compute on the GPUs")]
    return findings


def _storage(nodes: Sequence[NodeFacts]) -> list[Finding]:
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
            f"a run needs it on its driver's node only ({driver.host}); share it, or use a URI, "
            "for runs that must be resumed when that node is lost"
        )
        return [Finding("storage", "warning", "; ".join(unshared), remedy)]
    return [ok("storage", f"written and read by all of {_count(nodes)}")]


def _data(nodes: Sequence[NodeFacts]) -> list[Finding]:
    lacking = [f"{node.host}: {'; '.join(node.data_problems)}" for node in nodes]
    lacking = [text for text, node in zip(lacking, nodes, strict=True) if node.data_problems]
    remedy = "every worker reads them itself: put them at the same path on every node"
    return [Finding("data", "error", text, remedy) for text in lacking]


def _clocks(nodes: Sequence[NodeFacts]) -> Finding:
    worst = max(nodes, key=_skew_s)
    if _skew_s(worst) > _CLOCK_LIMIT_S:
        what = f"{worst.host} is {_skew_s(worst):.1f} s off the clock of {nodes[0].host}"
        remedy = "start chrony or systemd-timesyncd there: times in records and logs do not fit"
        return Finding("clocks", "warning", what, remedy)
    least = max(node.clock_uncertainty_s for node in nodes)
    return ok("clocks", f"equal, as far as {1000 * least:.0f} ms of travelling tell")


def _skew_s(node: NodeFacts) -> float:
    """At least; the time that a message was on its way says nothing about the clock."""
    return max(0.0, abs(node.clock_offset_s) - node.clock_uncertainty_s)


def _memory(nodes: Sequence[NodeFacts]) -> list[Finding]:
    findings = []
    for node in nodes:
        sizes = f"/dev/shm {node.shm_mib:,} MiB, object store {node.object_store_mib:,} MiB"
        what = f"{node.host}: {sizes}"
        if node.shm_mib < node.object_store_mib:
            remedy = "enlarge /dev/shm (a container: --shm-size): Ray falls back to the disk"
            findings.append(Finding("memory", "warning", what, remedy))
        elif node.object_store_mib < _SMALL_SHM_MIB:
            remedy = "data sets in memory and states must fit: ray start --object-store-memory"
            findings.append(Finding("memory", "warning", what, remedy))
    if findings:
        return findings
    smallest = min(nodes, key=lambda node: node.object_store_mib)
    text = f"object store {smallest.object_store_mib:,} MiB or more, inside /dev/shm"
    return [ok("memory", text)]


def _start_up(nodes: Sequence[NodeFacts], limit_s: float) -> Finding:
    slowest = max(nodes, key=lambda node: node.ready_s)
    what = f"a process is up, with torch imported, after {slowest.ready_s:.1f} s"
    if slowest.ready_s > limit_s / 4:
        remedy = "raise limits.start_s, or put the environment on a local disk"
        return Finding("start-up", "warning", f"{what} on {slowest.host}", remedy)
    return ok("start-up", f"{what} on the slowest node")


def check_exchange(workers: int, nodes: int, backend: str, mib: int, seconds: float) -> Finding:
    """On an all-reduce of `mib` MiB by `workers` processes in `seconds`.

    The rate is what each of them sends in a ring: 2 (n - 1) / n of the data.
    """
    rate = 2 * (workers - 1) / workers * mib / 1024 / seconds
    places = f"{workers} workers on {nodes} node{'s' if nodes != 1 else ''}"
    what = f"{mib} MiB over {places} with {backend}: {seconds:.3f} s, {rate:.2f} GiB/s each"
    if nodes > 1 and rate < _SLOW_GIB_PER_S:
        remedy = (
            f"is it the right network? {'NCCL' if backend == 'nccl' else 'GLOO'}_SOCKET_IFNAME on "
            "every node; larger batches need fewer exchanges"
        )
        return Finding("exchange", "warning", what, remedy)
    return ok("exchange", what)


def _count(nodes: Sequence[NodeFacts]) -> str:
    return f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}"
