"""Time how fast workers exchange gradients: an all-reduce between processes like theirs.

The processes are spread over the nodes, so that the network is part of the measurement.
"""

from __future__ import annotations

import socket
import statistics
import time
from datetime import timedelta
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from raytrain_opt.commands.doctor.checks import check_exchange
from raytrain_opt.commands.doctor.finding import Finding, ok

# About the gradients of a ResNet-18 in fp32; the median of five hides one slow repetition.
_MIB, _REPEATS = 32, 5
# Long enough for imports of torch on a slow disk, short for a user who waits.
_LIMIT_S = 120.0


def measure_exchange(count: int, resources: dict[str, float], use_gpu: bool) -> Finding:
    """Start `count` processes with a worker's resources, time them, and end them."""
    if count < 2:
        return ok("exchange", "not needed with one worker")
    backend = "nccl" if use_gpu else "gloo"
    other = {k: v for k, v in resources.items() if k not in ("CPU", "GPU")}
    remote: Any = ray.remote(_Rank)
    remote = remote.options(
        num_cpus=resources.get("CPU", 0),
        num_gpus=resources.get("GPU", 0),
        resources=other,
        scheduling_strategy="SPREAD",
    )
    ranks = [remote.remote() for _ in range(count)]
    try:
        init_method = ray.get(ranks[0].init_method.remote(), timeout=_LIMIT_S)
        nodes = set(ray.get([rank.node.remote() for rank in ranks], timeout=_LIMIT_S))
        durations_s = ray.get(
            [
                rank.all_reduce.remote(backend, init_method, i, count)
                for i, rank in enumerate(ranks)
            ],
            timeout=_LIMIT_S,
        )
    except (GetTimeoutError, RayError) as error:
        remedy = (
            "open all TCP ports between the nodes; /etc/hosts must not map a host name to "
            "127.0.1.1; with several networks select one: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
        )
        result = f"{count} workers could not exchange data with {backend}: {last_line(error)}"
        return Finding("exchange", "error", result, remedy)
    finally:
        for rank in ranks:
            ray.kill(rank)
    return check_exchange(count, len(nodes), backend, _MIB, max(durations_s))


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

    def all_reduce(self, backend: str, init_method: str, rank: int, count: int) -> float:
        """Return the median duration of one all-reduce in seconds, without the first.

        The first one opens the connections.
        """
        import torch
        import torch.distributed as dist

        device = torch.device("cuda" if backend == "nccl" else "cpu")
        data: Any = torch.ones(_MIB * 1024**2 // 4, device=device)
        dist.init_process_group(
            backend,
            init_method=init_method,
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=_LIMIT_S / 2),
        )
        durations_s = []
        for _ in range(_REPEATS + 1):
            start_s = time.monotonic()
            dist.all_reduce(data)
            float(data[0])  # waits for the device
            durations_s.append(time.monotonic() - start_s)
        dist.destroy_process_group()
        return statistics.median(durations_s[1:])


def last_line(error: Exception) -> str:
    """Return the last line of an error of Ray, where it names the remote exception."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
