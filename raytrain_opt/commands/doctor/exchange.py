"""Time an all-reduce between processes like the workers, spread over the nodes."""

from __future__ import annotations

import socket
import statistics
import time
from dataclasses import replace
from datetime import timedelta
from math import log2
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayError

from raytrain_opt.commands.doctor.checks import Finding, check_exchange, ok

# About the gradients of a ResNet-18 in fp32; the median of five hides one slow repetition.
_MIB, _REPEATS = 32, 5
# Long enough for imports of torch on a slow disk, short for a user who waits.
_LIMIT_S = 120.0


class ExchangeTimes(NamedTuple):
    """Seconds of an all-reduce of one number, and of 32 MiB, over `workers` on `nodes`."""

    workers: int
    nodes: int
    number_s: float
    tensor_s: float

    @property
    def gb_s(self) -> float:
        """GB/s that each process sends in a ring: 2 (n - 1) / n of the data."""
        share = 2 * (self.workers - 1) / self.workers
        return share * _MIB * 2**20 / 1e9 / max(self.tensor_s - self.number_s, 1e-9)

    @property
    def latency_us(self) -> float:
        """Microseconds of one message: 2 log2 n follow each other."""
        return 1e6 * self.number_s / (2 * log2(self.workers))


def measure_exchange(count: int, resources: dict[str, float], use_gpu: bool) -> Finding:
    """Judge the exchange of `count` processes with a worker's resources."""
    if count < 2:
        return ok("exchange", "not needed with one worker")
    backend = "nccl" if use_gpu else "gloo"
    try:
        times = time_exchange(count, resources, backend)
    except (GetTimeoutError, RayError) as error:
        remedy = (
            "open all TCP ports between the nodes; /etc/hosts must not map a host name to "
            "127.0.1.1; with several networks select one: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
        )
        result = f"{count} workers could not exchange data with {backend}: {last_line(error)}"
        return Finding("exchange", "error", result, remedy)
    finding = check_exchange(count, times.nodes, backend, _MIB, times.tensor_s)
    link = "network" if times.nodes > 1 else "link"
    figures = f"{link}_gb_s: {times.gb_s:.2g}, {link}_latency_us: {times.latency_us:.2g}"
    return replace(finding, result=f"{finding.result} (for plan: {figures})")


def time_exchange(count: int, resources: dict[str, float], backend: str) -> ExchangeTimes:
    """Start the processes, time them, and end them. Raises what Ray raises."""
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
        init_method = ray.get(ranks[0].init_method.remote(), timeout=_LIMIT_S)
        nodes = set(ray.get([rank.node.remote() for rank in ranks], timeout=_LIMIT_S))
        replies = ray.get(
            [
                rank.all_reduce.remote(backend, init_method, i, count)
                for i, rank in enumerate(ranks)
            ],
            timeout=_LIMIT_S,
        )
    finally:
        for rank in ranks:
            ray.kill(rank)
    return ExchangeTimes(count, len(nodes), *map(max, zip(*replies, strict=True)))


class _Rank:
    """One process of the group."""

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def init_method(self) -> str:
        """Return the address where the group meets: a port of this node that is free now."""
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        with socket.socket() as probe:
            probe.bind((address, 0))
            return f"tcp://{address}:{probe.getsockname()[1]}"

    def all_reduce(
        self, backend: str, init_method: str, rank: int, count: int
    ) -> tuple[float, float]:
        """Return the median seconds of an all-reduce of a number and of a tensor."""
        import torch
        import torch.distributed as dist

        device = torch.device("cuda" if backend == "nccl" else "cpu")
        dist.init_process_group(
            backend,
            init_method=init_method,
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=_LIMIT_S / 2),
        )

        def median_s(size: int) -> float:
            data: Any = torch.ones(size, device=device)
            durations_s = []
            for _ in range(_REPEATS + 1):
                start_s = time.monotonic()
                dist.all_reduce(data)
                float(data[0])  # waits for the device
                durations_s.append(time.monotonic() - start_s)
            return statistics.median(durations_s[1:])

        # In this order: the first one of all opens the connections.
        result = median_s(1), median_s(_MIB * 2**20 // 4)
        dist.destroy_process_group()
        return result


def last_line(error: Exception) -> str:
    """Return the last line of an error of Ray, where it names the remote exception."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
