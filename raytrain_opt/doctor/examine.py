"""Ask every node, try storage and network, and judge."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import GetTimeoutError, RayError

from raytrain_opt.check import check_job
from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.schema import Job
from raytrain_opt.doctor.checks import check_nodes
from raytrain_opt.doctor.exchange import cause, measure_exchange
from raytrain_opt.doctor.facts import Examiner, NodeFacts
from raytrain_opt.doctor.finding import Finding, ok, print_findings
from raytrain_opt.errors import CommitError, JobError, ResourcesError
from raytrain_opt.paths import read_stored, remove_stored, write_stored
from raytrain_opt.pools.resources import PoolPlan, plan_pools
from raytrain_opt.pools.session import alive_nodes, check_address, free_resources, ray_session
from raytrain_opt.search import most_candidates

# Defaults of the job file, for where there is none.
_STORAGE, _START_S = "runs", 600.0


def examine(job: Job | None, address: str | None) -> int:
    """Print what was found on the cluster at `address` (as for a run); 1 if there is an error."""
    try:
        check_address(address)
        with ray_session(address, verbose=False) as owned:
            findings = [_reached(owned), *_job(job), *_examined(job)]
    except JobError as error:
        what = "; ".join(str(problem) for problem in error.problems)
        remedy = "start the cluster, or give the head's address and token"
        findings = [Finding("Ray", "error", what, remedy)]
    print_findings(findings)
    return int(any(finding.level == "error" for finding in findings))


def _reached(owned: bool) -> Finding:
    if owned:
        return ok("Ray", "no cluster was named: Ray was started on this machine for the checks")
    return ok("Ray", f"reached, {len(alive_nodes())} nodes; the token is right, or none is asked")


def _job(job: Job | None) -> list[Finding]:
    """What a run would refuse here, before anything starts."""
    if job is None:
        return []
    problems = check_job(job)
    if not problems:
        return [ok("job", "its names, functions and files are right")]
    return [Finding("job", "error", str(problem), "see left") for problem in problems]


def _examined(job: Job | None) -> list[Finding]:
    start_s = _START_S if job is None else job.limits.start_s
    nodes, silent = _ask_nodes(job, start_s)
    if silent:
        return silent
    fits, plan = _fits(job)
    return [*check_nodes(nodes, start_s), *fits, _exchange(plan, len(nodes))]


def _ask_nodes(job: Job | None, limit_s: float) -> tuple[list[NodeFacts], list[Finding]]:
    """Facts of all nodes, that of the driver first; and of those that do not answer, what they
    say instead. The actors leave afterwards.
    """
    here = ray.get_runtime_context().get_node_id()
    nodes = sorted(alive_nodes(), key=lambda node: node["NodeID"] != here)
    start_s = monotonic_s()
    examiners = [_examiner(node["NodeID"]) for node in nodes]
    facts, silent = [], []
    try:
        asked = [examiner.facts.remote(job) for examiner in examiners]
        for node, examiner, answer in zip(nodes, examiners, asked, strict=True):
            try:
                left_s = max(0.0, start_s + limit_s - monotonic_s())
                told: NodeFacts = ray.get(answer, timeout=left_s)
            except (GetTimeoutError, RayError) as error:
                silent.append(_silent(node, error))
            else:
                facts.append(_completed(told, node, monotonic_s() - start_s, examiner))
        if not silent:
            facts = _with_storage(facts, examiners, _STORAGE if job is None else job.storage_path)
        return facts, silent
    finally:
        for examiner in examiners:
            ray.kill(examiner)


def _silent(node: dict[str, Any], error: Exception) -> Finding:
    what = f"{node['NodeManagerHostname']}: no process of this package runs there: {cause(error)}"
    remedy = "install constraints.txt and this package on it; its logs are below /tmp/ray"
    return Finding("start-up", "error", what, remedy)


def _completed(told: NodeFacts, node: dict[str, Any], ready_s: float, examiner: Any) -> NodeFacts:
    resources = node["Resources"]
    offset_s, uncertainty_s = _clock(examiner)
    return replace(
        told,
        ready_s=ready_s,
        ray_gpus=resources.get("GPU", 0.0),
        object_store_mib=int(resources.get("object_store_memory", 0)) // 1024**2,
        clock_offset_s=offset_s,
        clock_uncertainty_s=uncertainty_s,
    )


def _examiner(node_id: str) -> Any:
    options: dict[str, Any] = {"num_cpus": 0, "label_selector": {"ray.io/node-id": node_id}}
    return ray.remote(Examiner).options(**options).remote()


def _clock(examiner: Any) -> tuple[float, float]:
    """How far the node's clock is from ours, and how far a message's way lets us tell."""
    sent = time.time()
    there = float(ray.get(examiner.now.remote()))
    back = time.time()
    return there - (sent + back) / 2, (back - sent) / 2


def _with_storage(
    facts: Sequence[NodeFacts], examiners: Sequence[Any], place: str
) -> list[NodeFacts]:
    """A file from here to each node and one from each to here; both are removed."""
    stem = f".doctor-{uuid4().hex[:8]}"
    names = [f"{stem}-{i}" for i in range(len(facts))]
    try:
        write_stored(place, stem, b"written by raytrain-opt doctor")
    except CommitError as error:
        return [replace(facts[0], storage_error=str(error)), *facts[1:]]
    told = ray.get(
        [e.storage.remote(place, stem, n) for e, n in zip(examiners, names, strict=True)]
    )
    seen = [read_stored(place, name) is not None for name in names]
    for name in (stem, *(name for name, there in zip(names, seen, strict=True) if there)):
        remove_stored(place, name)
    return [
        replace(node, sees_storage=sees, storage_error=error, storage_seen=there)
        for node, (sees, error), there in zip(facts, told, seen, strict=True)
    ]


def _fits(job: Job | None) -> tuple[list[Finding], PoolPlan | None]:
    if job is None:
        return [], None
    try:
        plan = plan_pools(job, free_resources(), most_candidates(job))
    except ResourcesError as error:
        remedy = "see left; a cluster that grows by itself is waited for by a run (limits.start_s)"
        return [Finding("room", "error", str(error), remedy)], None
    what = f"{plan.workers} workers and {plan.slots} slots fit"
    busy = _taken()
    if busy:
        remedy = "other jobs hold it: a run waits for it until limits.start_s"
        return [Finding("room", "warning", f"{what}, but {busy} are taken", remedy)], plan
    return [ok("room", "; ".join((what, *plan.notes)))], plan


def _taken() -> str:
    """CPUs and GPUs that are in use."""
    all_there: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    names = ("CPU", "GPU")
    taken = {name: all_there.get(name, 0) - free.get(name, 0) for name in names}
    return ", ".join(f"{amount:g} {name}" for name, amount in taken.items() if amount > 0.01)


def _exchange(plan: PoolPlan | None, nodes: int) -> Finding:
    """Between the job's workers; without a job that fits, between one process on each node."""
    if plan is None:
        return measure_exchange(nodes, {"CPU": 0.001}, use_gpu=False)
    return measure_exchange(plan.workers, plan.worker_resources, plan.use_gpu)
