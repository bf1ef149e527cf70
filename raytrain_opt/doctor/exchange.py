"""How fast workers exchange gradients: a timed all-reduce between processes like them, which
are spread over the nodes, so that the network is in it.
"""

from __future__ import annotations

import socket
import statistics
import time
from datetime import timedelta
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from raytrain_opt.doctor.checks import check_exchange
from raytrain_opt.doctor.finding import Finding, ok

_MIB, _REPEATS = 32, 5
_LIMIT_S = 120.0


def measure_exchange(count: int, resources: dict[str, float], use_gpu: bool) -> Finding:
    """Start `count` processes that ask Ray for what a worker asks for; they leave afterwards."""
    if count < 2:
        return ok("exchange", "one worker exchanges nothing")
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
        meeting_point = ray.get(ranks[0].meeting_point.remote(), timeout=_LIMIT_S)
        nodes = set(ray.get([rank.node.remote() for rank in ranks], timeout=_LIMIT_S))
        times = ray.get(
            [
                rank.all_reduce.remote(backend, meeting_point, i, count)
                for i, rank in enumerate(ranks)
            ],
            timeout=_LIMIT_S,
        )
    except (GetTimeoutError, RayError) as error:
        remedy = (
            "open all TCP ports between the nodes; a host name must not stand for 127.0.1.1 in "
            "/etc/hosts; with several networks name one: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
        )
        what = f"{count} workers could not exchange data with {backend}: {cause(error)}"
        return Finding("exchange", "error", what, remedy)
    finally:
        for rank in ranks:
            ray.kill(rank)
    return check_exchange(count, len(nodes), backend, _MIB, max(times))


class _Rank:
    """One process of the group."""

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def meeting_point(self) -> str:
        """Where the others find this one: a port that is free now."""
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        with socket.socket() as probe:
            probe.bind((address, 0))
            return f"tcp://{address}:{probe.getsockname()[1]}"

    def all_reduce(self, backend: str, meeting_point: str, rank: int, count: int) -> float:
        """Median seconds of one exchange; the first, which connects, is not counted."""
        import torch
        import torch.distributed as dist

        device = torch.device("cuda" if backend == "nccl" else "cpu")
        data: Any = torch.ones(_MIB * 1024**2 // 4, device=device)
        dist.init_process_group(
            backend,
            init_method=meeting_point,
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=_LIMIT_S / 2),
        )
        times = []
        for _ in range(_REPEATS + 1):
            start_s = time.monotonic()
            dist.all_reduce(data)
            float(data[0])  # waits for the device
            times.append(time.monotonic() - start_s)
        dist.destroy_process_group()
        return statistics.median(times[1:])


def cause(error: Exception) -> str:
    """The last line of what Ray says, which is where a remote exception tells what it is."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
