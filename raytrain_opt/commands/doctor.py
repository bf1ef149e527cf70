"""`raytrain-opt doctor`: find what would go wrong on a cluster before paying for a run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal
from uuid import uuid4

import ray
from ray.exceptions import GetTimeoutError, RayError
from rich.table import Table
from rich.text import Text

from raytrain_opt import storage
from raytrain_opt.clock import monotonic_s
from raytrain_opt.cluster import connection
from raytrain_opt.cluster.resources import plan_pools
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import JobError, ResourcesError, StorageError, first_of, printable
from raytrain_opt.execution.check import check_data, check_job
from raytrain_opt.monitoring import gpu_names
from raytrain_opt.recording.recorder import versions
from raytrain_opt.report.plots import times
from raytrain_opt.terminal import Output

_STYLES = {"ok": "green", "warning": "yellow", "error": "red"}
Level = Literal["ok", "warning", "error"]


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
        connection.check_address(address)
        with connection.ray_session(address, verbose=False) as owned:
            findings = _check_cluster(job, owned)
    except JobError as error:
        result = "; ".join(str(problem) for problem in error.problems)
        remedy = "start the cluster, or give the head's address and token"
        findings = [Finding("Ray", "error", result, remedy)]
    print_findings(findings)
    return int(any(finding.level == "error" for finding in findings))


def print_findings(findings: Iterable[Finding]) -> None:
    """Print one table on standard output."""
    console = Output(file=sys.stdout, width=None if sys.stdout.isatty() else 120)  # of a log
    table = Table("", "check", "result", "what to do")
    for finding in findings:
        cells = (Text(printable(text)) for text in (finding.check, finding.result, finding.remedy))
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), *cells)
    console.print(table)


def _check_cluster(job: Job | None, owned: bool) -> list[Finding]:
    result = f"{times(len(connection.alive_nodes()), 'node')} connected"
    if owned:
        result = "no cluster was given: Ray was started on this machine for the checks"
    findings = [Finding("Ray", "ok", result)]
    if job is not None:  # what a run would refuse before anything starts
        problems = [Finding("job", "error", str(p), "correct the job") for p in check_job(job)]
        findings += problems or [Finding("job", "ok", "names, functions and files are valid")]
    path = "runs" if job is None else job.storage_path
    file = f".doctor-{uuid4().hex[:8]}"
    try:
        storage.write(path, file, b"written by raytrain-opt doctor")
        try:
            findings += merged(_ask_nodes(job, path, file))
        finally:
            storage.remove(path, file)
    except StorageError as error:
        remedy = "give a storage_path that the head can write"
        return [*findings, Finding("storage", "error", str(error), remedy)]
    return findings if job is None else [*findings, _check_room(job)]


def merged(found: Iterable[tuple[str, Finding]]) -> list[Finding]:
    """Return each finding once, with the hosts that report it."""
    hosts: dict[Finding, list[str]] = {}
    for host, finding in found:
        hosts.setdefault(finding, []).append(host)
    ordered = sorted(hosts.items(), key=lambda item: item[0].check)
    return [replace(f, result=f"{first_of(names)}: {f.result}") for f, names in ordered]


def _ask_nodes(job: Job | None, path: str, file: str) -> Iterator[tuple[str, Finding]]:
    """Yield what each node finds, with its host; or that it is silent."""
    end_s = monotonic_s() + (600 if job is None else job.timeouts.start_s)
    remote: Any = ray.remote(look_at_node)
    pending = []
    for node in connection.alive_nodes():
        label, gpus = {"ray.io/node-id": node["NodeID"]}, node["Resources"].get("GPU", 0.0)
        there = remote.options(num_cpus=0, max_retries=0, label_selector=label)
        task = there.remote(versions(), gpus, job, path, file)
        pending.append((node["NodeManagerHostname"], task))
    for host, task in pending:
        try:
            for finding in ray.get(task, timeout=max(0.0, end_s - monotonic_s())):
                yield host, finding
        except (GetTimeoutError, RayError) as error:
            # In its last line Ray names the remote exception.
            last_line = str(error).strip().rpartition("\n")[2] or type(error).__name__
            result = f"no process of this package starts and answers there: {last_line}"
            remedy = "install constraints.txt and this package on it; its logs are below /tmp/ray"
            yield host, Finding("start-up", "error", result, remedy)


def look_at_node(
    expected: Mapping[str, str], ray_gpus: float, job: Job | None, path: str, file: str
) -> list[Finding]:
    """Return the findings of this node: `expected` are the driver's versions, `file` is its file.

    Imports torch, as the processes of a run do.
    """
    import torch  # noqa: F401

    own = versions()
    other = [f"{k} {own.get(k)}, not {v}" for k, v in expected.items() if own.get(k) != v]
    texts = other or [f"{name} {number}" for name, number in own.items()]
    remedy = "install constraints.txt on every node; all need the versions of the driver"
    findings = [
        Finding("versions", "error" if other else "ok", ", ".join(texts), remedy * bool(other)),
        _look_at_gpus(ray_gpus),
    ]
    remedy = (
        "use shared storage or a URI for runs that must resume after the driver's node is lost"
    )
    try:
        is_seen, error = storage.read(path, file) is not None, "does not see the driver's files"
    except StorageError as failure:
        is_seen, error = False, str(failure)
    read = Finding("storage", "ok", "reads what the driver has written")
    findings.append(read if is_seen else Finding("storage", "warning", error, remedy))
    # Each worker and slot reads these data itself; the driver reads the in-memory sets.
    if job is not None and job.data.on_nodes and (problems := check_data(job.data)):
        remedy = "every worker reads the data itself: put them at the same path on every node"
        findings.append(Finding("data", "error", "; ".join(map(str, problems)), remedy))
    return findings


def _look_at_gpus(ray_gpus: float) -> Finding:
    """Compare what NVML sees with what Ray offers."""
    try:
        names = gpu_names()
    except ResourcesError as error:
        return Finding("GPUs", "error", str(error), "check nvidia-smi there")
    found = f"{len(names)} x {', '.join(sorted({*names}))}" if names else "none"
    if ray_gpus == len(names):
        return Finding("GPUs", "ok", found)
    remedy = "check nvidia-smi; restart Ray there without CUDA_VISIBLE_DEVICES and --num-gpus"
    level: Level = "error" if ray_gpus > len(names) else "warning"
    return Finding("GPUs", level, f"{found}, and Ray offers {ray_gpus:g}", remedy)


def _check_room(job: Job) -> Finding:
    """Return whether workers and slots fit."""
    try:
        plan = plan_pools(job, job.slot_candidates, connection.total_resources())
    except ResourcesError as error:
        remedy = "change the job; a run waits until timeouts.start_s for nodes that come later"
        return Finding("room", "error", str(error), remedy)
    return Finding("room", "ok", f"{plan.workers} workers and {plan.slots} slots fit")
