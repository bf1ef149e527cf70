"""Ask every node, try storage and network, and print the findings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import GetTimeoutError, RayError

from raytrain_opt import storage
from raytrain_opt.clock import monotonic_s
from raytrain_opt.cluster.connection import (
    alive_nodes,
    check_address,
    ray_session,
    total_resources,
)
from raytrain_opt.cluster.resources import PoolPlan, plan_pools
from raytrain_opt.commands.doctor.checks import Finding, check_nodes, ok, print_findings
from raytrain_opt.commands.doctor.exchange import last_line, measure_exchange
from raytrain_opt.commands.doctor.facts import NodeFacts, NodeInspector
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import JobError, ResourcesError, StorageError
from raytrain_opt.execution.preflight import check_job, pool_request
from raytrain_opt.search.factory import max_candidates

# The defaults of the job file, used without a job.
_STORAGE_PATH, _START_S = "runs", 600.0
# Seconds for a node's clock, or its storage, to answer: generous for any that work.
_ANSWER_S = 60.0
# Resources below this are rounding errors of Ray's fractions.
_MIN_AMOUNT = 0.01


def diagnose(job: Job | None, address: str | None) -> int:
    """Print the findings on the cluster at `address`; return 1 if one is an error, else 0."""
    try:
        check_address(address)
        with ray_session(address, verbose=False) as owned:
            findings = [_connection_finding(owned), *_check_job(job), *_check_cluster(job)]
    except JobError as error:
        result = "; ".join(str(problem) for problem in error.problems)
        remedy = "start the cluster, or give the head's address and token"
        findings = [Finding("Ray", "error", result, remedy)]
    print_findings(findings)
    return int(any(finding.level == "error" for finding in findings))


def _connection_finding(owned: bool) -> Finding:
    if owned:
        return ok("Ray", "no cluster was given: Ray was started on this machine for the checks")
    return ok("Ray", f"connected to {len(alive_nodes())} nodes; the token, if any, is accepted")


def _check_job(job: Job | None) -> list[Finding]:
    """Return what a run would refuse here before anything starts."""
    if job is None:
        return []
    problems = check_job(job)
    if not problems:
        return [ok("job", "its names, functions and files are valid")]
    return [Finding("job", "error", str(problem), "correct the job file") for problem in problems]


def _check_cluster(job: Job | None) -> list[Finding]:
    start_s = _START_S if job is None else job.timeouts.start_s
    nodes, failures = _ask_nodes(job, start_s)
    if failures:
        return failures
    room_findings, plan = _check_room(job)
    return [*check_nodes(nodes, start_s), *room_findings, _check_exchange(plan, len(nodes))]


def _ask_nodes(job: Job | None, limit_s: float) -> tuple[list[NodeFacts], list[Finding]]:
    """Return the facts of all nodes, the driver's first, and a finding for each that is silent."""
    driver_id = ray.get_runtime_context().get_node_id()
    nodes = sorted(alive_nodes(), key=lambda node: node["NodeID"] != driver_id)
    start_s = monotonic_s()
    inspectors = [_start_inspector(node["NodeID"]) for node in nodes]
    facts, failures = [], []
    try:
        pending = [inspector.facts.remote(job) for inspector in inspectors]
        for node, inspector, reply in zip(nodes, inspectors, pending, strict=True):
            try:
                left_s = max(0.0, start_s + limit_s - monotonic_s())
                reported: NodeFacts = ray.get(reply, timeout=left_s)
                ready_s = monotonic_s() - start_s
                facts.append(_add_measurements(reported, node, ready_s, inspector))
            except (GetTimeoutError, RayError) as error:
                failures.append(_silent_node(node, error))
        if not failures:
            storage_path = _STORAGE_PATH if job is None else job.storage_path
            facts = _add_storage(facts, inspectors, storage_path)
        return facts, failures
    finally:
        for inspector in inspectors:
            ray.kill(inspector)


def _silent_node(node: dict[str, Any], error: Exception) -> Finding:
    result = (
        f"{node['NodeManagerHostname']}: no process of this package starts there: "
        f"{last_line(error)}"
    )
    remedy = "install constraints.txt and this package on it; its logs are below /tmp/ray"
    return Finding("start-up", "error", result, remedy)


def _add_measurements(
    facts: NodeFacts, node: dict[str, Any], ready_s: float, inspector: Any
) -> NodeFacts:
    """Return the facts with what Ray knows of the node and what is measured from here."""
    resources = node["Resources"]
    offset_s, uncertainty_s = _measure_clock(inspector)
    return replace(
        facts,
        ready_s=ready_s,
        ray_gpus=resources.get("GPU", 0.0),
        object_store_mib=int(resources.get("object_store_memory", 0)) // 1024**2,
        clock_offset_s=offset_s,
        clock_uncertainty_s=uncertainty_s,
    )


def _start_inspector(node_id: str) -> Any:
    options: dict[str, Any] = {"num_cpus": 0, "label_selector": {"ray.io/node-id": node_id}}
    return ray.remote(NodeInspector).options(**options).remote()


def _measure_clock(inspector: Any) -> tuple[float, float]:
    """Return the offset of the node's clock from ours, and its uncertainty, in seconds."""
    sent = time.time()
    remote = float(ray.get(inspector.now.remote(), timeout=_ANSWER_S))
    received = time.time()
    return remote - (sent + received) / 2, (received - sent) / 2


def _add_storage(
    facts: Sequence[NodeFacts], inspectors: Sequence[Any], storage_path: str
) -> list[NodeFacts]:
    """Return the facts with what happened to a file from here and to one from each node."""
    driver_file = f".doctor-{uuid4().hex[:8]}"
    node_files = [f"{driver_file}-{i}" for i in range(len(facts))]
    try:
        storage.write(storage_path, driver_file, b"written by raytrain-opt doctor")
    except StorageError as error:
        return [replace(facts[0], storage_error=str(error)), *facts[1:]]
    pending = [
        inspector.check_storage.remote(storage_path, driver_file, node_file)
        for inspector, node_file in zip(inspectors, node_files, strict=True)
    ]
    ready, _ = ray.wait(pending, num_returns=len(pending), timeout=_ANSWER_S)
    silent = (False, f"the storage did not answer within {_ANSWER_S:g} s")
    replies = [ray.get(ref, timeout=_ANSWER_S) if ref in ready else silent for ref in pending]
    visible = [storage.read(storage_path, name) is not None for name in node_files]
    written = [name for name, is_visible in zip(node_files, visible, strict=True) if is_visible]
    for name in (driver_file, *written):
        storage.remove(storage_path, name)
    return [
        replace(node, sees_storage=sees, storage_error=error, storage_seen=seen)
        for node, (sees, error), seen in zip(facts, replies, visible, strict=True)
    ]


def _check_room(job: Job | None) -> tuple[list[Finding], PoolPlan | None]:
    if job is None:
        return [], None
    try:
        plan = plan_pools(pool_request(job, candidates=max_candidates(job)), total_resources())
    except ResourcesError as error:
        remedy = (
            "change the job as described; if the cluster adds nodes automatically, a run waits "
            "for them until timeouts.start_s"
        )
        return [Finding("room", "error", str(error), remedy)], None
    result = f"{plan.workers} workers and {plan.slots} slots fit"
    used = _used_resources()
    if used:
        remedy = "other jobs use them: a run waits for them until timeouts.start_s"
        return [Finding("room", "warning", f"{result}, but {used} are in use", remedy)], plan
    return [ok("room", "; ".join((result, *plan.notes)))], plan


def _used_resources() -> str:
    """Return the CPUs and GPUs in use, as text."""
    total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    used = {name: total.get(name, 0) - free.get(name, 0) for name in ("CPU", "GPU")}
    return ", ".join(f"{amount:g} {name}" for name, amount in used.items() if amount > _MIN_AMOUNT)


def _check_exchange(plan: PoolPlan | None, nodes: int) -> Finding:
    """Time the job's workers; without a job that fits, one process on each node."""
    if plan is None:
        return measure_exchange(nodes, {"CPU": 0.001}, use_gpu=False)
    return measure_exchange(plan.workers, plan.worker_resources, plan.use_gpu)
