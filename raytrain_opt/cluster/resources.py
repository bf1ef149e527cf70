"""Which Ray resources the two pools ask for, and whether the cluster has them. Pure.

The pools take turns, so a worker and a slot use the same GPU or CPU: a worker asks for 0.6 of it,
a slot for 0.4. More than half, so that two workers never land on one GPU (NCCL fails).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raytrain_opt.config.processes import SlotsSection, WorkersSection
from raytrain_opt.errors import ResourcesError

_WORKER_FRACTION, _SLOT_FRACTION = 0.6, 0.4
_EPSILON = 1e-6  # sums of fractions are not exact

Resources = dict[str, float]


@dataclass(frozen=True)
class PoolRequest:
    """What a job needs of a cluster.

    `candidates`: largest number of candidates in a round; 0 for none. `sync_batch_norm`: whether
    workers use SyncBatchNorm, which needs GPUs.
    """

    workers: WorkersSection
    slots: SlotsSection
    candidates: int
    sync_batch_norm: bool


@dataclass(frozen=True)
class PoolPlan:
    """What to start.

    `slots` is 0 when the policy has no candidates. `placed_workers` of the `workers` fit now: all
    of them unless the job allows fewer.
    """

    use_gpu: bool
    workers: int
    placed_workers: int
    worker_resources: Resources
    slots: int
    slot_resources: Resources
    slots_per_node: int
    notes: tuple[str, ...] = ()


def plan_pools(request: PoolRequest, nodes: Sequence[Mapping[str, float]]) -> PoolPlan:
    """Plan the pools of workers and slots.

    `nodes`: free resources of each node. Raises ResourcesError saying what is missing when
    the workers do not fit, or not even one slot beside them. Fewer slots than candidates
    is no error: the candidates run in waves.
    """
    workers, slots, candidates = request.workers, request.slots, request.candidates
    count, use_gpu = workers.count, _use_gpu(workers, nodes)
    worker = dict(workers.resources or _default(count, nodes, use_gpu, _WORKER_FRACTION))
    slot = dict(slots.resources or _default(count, nodes, use_gpu, _SLOT_FRACTION))
    _require_gpu("workers.resources", worker, use_gpu)
    _require_gpu("slots.resources", slot, use_gpu)
    if request.sync_batch_norm and not use_gpu and count > 1:
        raise ResourcesError(
            "batch_norm.sync: torch's SyncBatchNorm needs GPUs, and this job trains without "
            f"({_describe(nodes)}); leave it out"
        )
    free = [_Node(node) for node in nodes]
    placed = _place(free, worker, count)
    if placed < workers.min_workers:
        raise ResourcesError(
            f"workers.count: {count} workers of {_text(worker)} each do not fit: "
            f"room for {placed} on {_describe(nodes)}. Ask for fewer workers, for less in "
            "workers.resources, or add nodes."
        )
    if not candidates:
        return PoolPlan(use_gpu, count, placed, worker, 0, {}, 0)
    slot_count = _place(free, slot, min(slots.count or candidates, candidates))
    if slot_count == 0:
        raise ResourcesError(
            f"slots: not even one slot of {_text(slot)} fits beside {count} workers "
            f"of {_text(worker)} on {_describe(nodes)}. Ask for less in slots.resources or "
            "workers.resources, for fewer workers, or use learning_rate.policy: schedule."
        )
    per_node = math.ceil(slot_count / len(free))
    waves = math.ceil(candidates / slot_count)
    note = f"{candidates} candidates run in {waves} waves over {slot_count} slots"
    return PoolPlan(
        use_gpu,
        count,
        placed,
        worker,
        slot_count,
        slot,
        per_node,
        (note,) if waves > 1 else (),
    )


def _use_gpu(workers: WorkersSection, nodes: Sequence[Mapping[str, float]]) -> bool:
    setting, resources = workers.use_gpu, workers.resources
    has_gpu = any(node.get("GPU", 0) > 0 for node in nodes)
    if setting is True and not has_gpu:
        raise ResourcesError(
            f"workers.use_gpu: true, but no node has a GPU ({_describe(nodes)}); use auto or false"
        )
    if setting != "auto":
        return setting
    return has_gpu and (resources is None or resources.get("GPU", 0) > 0)


def _require_gpu(path: str, resources: Resources, use_gpu: bool) -> None:
    if use_gpu and not resources.get("GPU"):
        raise ResourcesError(
            f"{path}: the job trains on GPUs, but {_text(resources)} has none; add GPU, or set "
            "workers.use_gpu: false"
        )


def _default(
    workers: int, nodes: Sequence[Mapping[str, float]], use_gpu: bool, fraction: float
) -> Resources:
    cpus = sum(node.get("CPU", 0) for node in nodes)
    if cpus <= 0:
        raise ResourcesError(f"no node offers a CPU for workers: {_describe(nodes)}")
    cpus_per_worker = min(1.0, cpus / workers) * fraction
    cpu = math.floor(cpus_per_worker * 1000) / 1000  # Ray counts in steps of 1/10000
    return {"CPU": cpu, "GPU": fraction} if use_gpu else {"CPU": cpu}


class _Node:
    """Free resources of a node; GPUs one by one, since a fraction comes from one device."""

    def __init__(self, free: Mapping[str, float]) -> None:
        self.other = {name: amount for name, amount in free.items() if name != "GPU"}
        self.gpus = [1.0] * int(free.get("GPU", 0))

    def take(self, need: Resources) -> bool:
        """Reserve `need` if it fits; return whether it did."""
        if any(self.other.get(k, 0.0) + _EPSILON < v for k, v in need.items() if k != "GPU"):
            return False
        if not self._take_gpus(need.get("GPU", 0.0)):
            return False
        for name in need.keys() - {"GPU"}:
            self.other[name] = self.other.get(name, 0.0) - need[name]
        return True

    def _take_gpus(self, amount: float) -> bool:
        per_device, devices = (1.0, round(amount)) if amount >= 1 else (amount, bool(amount))
        fitting = [i for i, free in enumerate(self.gpus) if free + _EPSILON >= per_device]
        # Ray packs fractions: the fullest device that still fits is taken first.
        fitting.sort(key=lambda i: self.gpus[i])
        for i in fitting[:devices] if len(fitting) >= devices else []:
            self.gpus[i] -= per_device
        return len(fitting) >= devices


def _place(nodes: Sequence[_Node], need: Resources, count: int) -> int:
    """Reserve `need` up to `count` times; return how often it fitted."""
    placed = 0
    for node in nodes:
        while placed < count and node.take(need):
            placed += 1
    return placed


def _text(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def _describe(nodes: Sequence[Mapping[str, float]]) -> str:
    texts = "; ".join(
        _text({k: node[k] for k in ("CPU", "GPU") if node.get(k)}) or "nothing free"
        for node in nodes
    )
    return f"{len(nodes)} node{'s' if len(nodes) != 1 else ''} ({texts})"
