"""Plan which Ray resources workers and slots ask for; wait until the cluster has them.

Workers and slots take turns on the same GPU or CPU: a worker asks for 0.6 of it, a slot for 0.4.
More than half, so that two workers never land on one GPU (NCCL fails). Without slots, a worker
asks for a complete GPU.

Ray has no call that says whether nodes can still join. `ray up` leaves its file on the head, where
drivers run, and KubeRay an environment variable. Without either, a job that does not fit is
refused at once.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import ray
import yaml

from raytrain_opt.clock import monotonic_s
from raytrain_opt.cluster.connection import alive_nodes, free_resources, total_resources
from raytrain_opt.config.schema import Job, WorkersSection
from raytrain_opt.errors import JobError, Problem, ResourcesError

WORKER_FRACTION, SLOT_FRACTION = 0.6, 0.4
# A call costs the mailbox up to 1 ms, so a command to as many takes a quarter of a second.
_MAX_ASYNCHRONOUS = 256
_EPSILON = 1e-6  # sums of fractions are not exact

Resources = dict[str, float]


@dataclass(frozen=True)
class PoolPlan:
    """What to start."""

    use_gpu: bool
    workers: int
    placed_workers: int  # that fit now: all of them unless the job allows fewer
    worker_resources: Resources
    slots: int = 0  # when there are no candidates, or workers train them
    slot_resources: Resources = field(default_factory=dict)
    slots_per_node: int = 0
    workers_per_node: int = 1  # placed, on the node with most of them


def plan_pools(job: Job, candidates: int, nodes: Sequence[Mapping[str, float]]) -> PoolPlan:
    """Plan the pools of workers and slots.

    `candidates`: of a round on slots, at most. `nodes`: free resources of each node. Raises
    ResourcesError saying what is missing when the workers do not fit, or not even one slot beside
    them where slots are needed. Fewer slots than candidates is no error: they run in waves.
    """
    if not candidates:
        return _plan_workers(job, nodes, gpu=1.0)[0]
    plan, free = _plan_workers(job, nodes, WORKER_FRACTION)
    slots, count, use_gpu = job.slots, plan.workers, plan.use_gpu
    slot = dict(slots.resources or _default(count, nodes, use_gpu, SLOT_FRACTION, SLOT_FRACTION))
    _require_gpu("slots.resources", slot, use_gpu)
    placed = len(_place(free, slot, min(slots.count or candidates, candidates)))
    if not placed:
        raise ResourcesError(
            f"slots: not even one slot of {_text(slot)} fits beside {count} workers "
            f"of {_text(plan.worker_resources)} on {_describe(nodes)}. Ask for less in "
            "slots.resources or workers.resources, for fewer workers, or use "
            "learning_rate.search_on: workers."
        )
    return replace(
        plan, slots=placed, slot_resources=slot, slots_per_node=math.ceil(placed / len(free))
    )


def _plan_workers(
    job: Job, nodes: Sequence[Mapping[str, float]], gpu: float
) -> tuple[PoolPlan, list[_Node]]:
    """Plan the workers, by default with this part of a GPU each; also return what is left."""
    workers, is_async = job.workers, not job.parallel.common_steps
    use_gpu = _use_gpu(workers, nodes)
    count = _worker_count(job, nodes, use_gpu=use_gpu)
    if is_async and count > _MAX_ASYNCHRONOUS:
        rule = f"at most {_MAX_ASYNCHRONOUS} with async, each of which calls the mailbox"
        hint = "use fewer workers, or parallel.mode: sync, whose first worker speaks for all"
        raise JobError([Problem("workers.count", rule, str(count), hint)])
    worker = dict(workers.resources or _default(count, nodes, use_gpu, WORKER_FRACTION, gpu))
    _require_gpu("workers.resources", worker, use_gpu)
    free = [_Node(node) for node in nodes]
    placed = _place(free, worker, count)
    if len(placed) < workers.min_workers:
        raise ResourcesError(
            f"workers.count: {count} workers of {_text(worker)} each do not fit: "
            f"room for {len(placed)} on {_describe(nodes)}. Ask for fewer workers, for less in "
            "workers.resources, or add nodes."
        )
    if use_gpu and not is_async and len(set(placed)) < len(placed):
        raise ResourcesError(
            f"workers.resources: {_text(worker)} lets several workers use one GPU, and NCCL needs "
            "a GPU for each. Ask for more than 0.5 GPU, for fewer workers, or use "
            "parallel.mode: async."
        )
    most = max(Counter(node for node, _ in placed).values())
    return PoolPlan(use_gpu, count, len(placed), worker, workers_per_node=most), free


def _worker_count(job: Job, nodes: Sequence[Mapping[str, float]], *, use_gpu: bool) -> int:
    workers, micro_batches = job.workers, job.parallel.micro_batches
    if workers.is_given or not use_gpu:
        return workers.size
    devices = max(1, int((workers.resources or {}).get("GPU", 1)))
    room = sum(int(node.get("GPU", 0)) // devices for node in nodes)
    if micro_batches is not None:
        return max(1, min(room, micro_batches))
    return next((n for n in range(room, 0, -1) if job.global_batch_size % n == 0), 1)


def _use_gpu(workers: WorkersSection, nodes: Sequence[Mapping[str, float]]) -> bool:
    resources, has_gpu = workers.resources, any(node.get("GPU", 0) > 0 for node in nodes)
    use_gpu = workers.uses_gpu(has_gpu and (resources is None or resources.get("GPU", 0) > 0))
    if use_gpu and not has_gpu:
        raise ResourcesError(
            f"the job trains on GPUs, but no node has a free one ({_describe(nodes)}). "
            "Set workers.use_gpu: false to train without."
        )
    return use_gpu


def _require_gpu(path: str, resources: Resources, use_gpu: bool) -> None:
    if use_gpu and not resources.get("GPU"):
        raise ResourcesError(
            f"{path}: the job trains on GPUs, but {_text(resources)} has none; add GPU, or set "
            "workers.use_gpu: false"
        )


def _default(
    workers: int, nodes: Sequence[Mapping[str, float]], use_gpu: bool, fraction: float, gpu: float
) -> Resources:
    cpus = sum(node.get("CPU", 0) for node in nodes)
    if cpus <= 0:
        raise ResourcesError(f"no node offers a CPU for workers: {_describe(nodes)}")
    cpus_per_worker = min(1.0, cpus / workers) * fraction
    cpu = math.floor(cpus_per_worker * 1000) / 1000  # Ray counts in steps of 1/10000
    return {"CPU": cpu, "GPU": gpu} if use_gpu else {"CPU": cpu}


class _Node:
    """Free resources of a node; GPUs one by one, since a fraction comes from one device."""

    def __init__(self, free: Mapping[str, float]) -> None:
        self.other = {name: amount for name, amount in free.items() if name != "GPU"}
        self.gpus = [1.0] * int(free.get("GPU", 0))

    def take(self, need: Resources) -> int | None:
        """Reserve `need`; return the device that computes, None if there is not enough."""
        if any(self.other.get(k, 0.0) + _EPSILON < v for k, v in need.items() if k != "GPU"):
            return None
        amount = need.get("GPU", 0.0)
        per_device, devices = (1.0, round(amount)) if amount >= 1 else (amount, int(amount > 0))
        fitting = [i for i, free in enumerate(self.gpus) if free + _EPSILON >= per_device]
        if len(fitting) < devices:
            return None
        # Ray packs fractions: the fullest device that still fits is taken first.
        taken = sorted(fitting, key=lambda i: self.gpus[i])[:devices]
        for i in taken:
            self.gpus[i] -= per_device
        for name in need.keys() - {"GPU"}:
            self.other[name] = self.other.get(name, 0.0) - need[name]
        return taken[0] if taken else 0


def _place(nodes: Sequence[_Node], need: Resources, count: int) -> list[tuple[int, int]]:
    """Reserve `need` up to `count` times; return node and device of each that fitted."""
    placed: list[tuple[int, int]] = []
    for number, node in enumerate(nodes):
        while len(placed) < count and (device := node.take(need)) is not None:
            placed.append((number, device))
    return placed


def _text(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def _describe(nodes: Sequence[Mapping[str, float]]) -> str:
    texts = "; ".join(
        _text({k: node[k] for k in ("CPU", "GPU") if node.get(k)}) or "nothing free"
        for node in nodes
    )
    return f"{len(nodes)} node{'s' if len(nodes) != 1 else ''} ({texts})"


# A cloud node takes a minute or more to join: no need to look more often. Ray waits whole seconds.
_POLL_S = 5
# A run that has just ended, in this driver or another one, has given back what it held by then.
_RELEASE_S, _RELEASE_POLL_S = 5.0, 0.2
_CLUSTER_FILE = Path("~/ray_bootstrap_config.yaml")
_KUBERAY = "RAY_USAGE_STATS_KUBERAY_IN_USE"


def plan_when_there_is_room(job: Job, candidates: int, note: Callable[[str], None]) -> PoolPlan:
    """Plan as `plan_pools` with what other jobs leave free.

    If that is too little, wait up to `timeouts.start_s` for them, and for nodes that may join.
    `note` is called with a message when the wait begins.

    Raises ResourcesError saying what is missing: at once if it would not fit into an idle cluster
    that cannot grow.
    """
    began_s, limit_s = monotonic_s(), job.timeouts.start_s
    released_s = began_s
    ideal: PoolPlan | None = None  # of an idle cluster
    is_noted, refused = False, ResourcesError("other jobs hold what this one needs.")
    while monotonic_s() - began_s < limit_s:
        settled = monotonic_s() - released_s >= _RELEASE_S
        grows = may_grow(len(alive_nodes()))
        try:
            if ideal is None:
                ideal = plan_pools(job, candidates, total_resources())
                # With GPUs that others hold now, `auto` still means these.
                workers = job.workers.model_copy(update={"use_gpu": ideal.use_gpu})
                job = job.model_copy(update={"workers": workers})
            plan = plan_pools(job, candidates, free_resources())
            if settled or plan == ideal:
                return plan
        except ResourcesError as error:
            if ideal is None and not grows:
                raise
            refused = error
            if settled and not is_noted:
                note(f"waiting up to {limit_s:.0f} s (timeouts.start_s) for room: {refused}")
                is_noted = True
        if not (settled and grows):
            time.sleep(_POLL_S if settled else _RELEASE_POLL_S)
        elif _request_nodes(expected_resources(job, candidates)):
            released_s = monotonic_s()
    raise ResourcesError(f"{refused} There was no room within {limit_s:.0f} s.")


def may_grow(nodes: int) -> bool:
    """Return whether more nodes may join than the cluster has, as far as the head knows."""
    if os.environ.get(_KUBERAY) == "1":
        return True
    if not (path := _CLUSTER_FILE.expanduser()).is_file():
        return False
    cluster = yaml.safe_load(path.read_text(encoding="utf-8"))
    return nodes < 1 + int(cluster.get("max_workers", 0))


def expected_resources(job: Job, candidates: int) -> list[Resources]:
    """Return what workers and a slot will ask for, as far as it is known before nodes join."""
    workers, device = job.workers, "GPU" if job.workers.uses_gpu(available=False) else "CPU"
    if not candidates:
        return [workers.resources or {device: 1.0}] * workers.size
    worker = workers.resources or {device: WORKER_FRACTION}
    return [worker] * workers.size + [job.slots.resources or {device: SLOT_FRACTION}]


def _request_nodes(resources: list[Resources]) -> bool:
    """Make the autoscaler start nodes; return whether there was room, which is free then."""
    # It learns of a placement group, which ends with this process.
    group = ray.util.placement_group(resources)
    try:
        return bool(group.wait(_POLL_S))
    finally:
        ray.util.remove_placement_group(group)
