"""Connect to Ray, or start it on this machine, quietly; and leave it as it was found."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from urllib.parse import urlsplit

import ray
from ray._private import ray_constants
from ray._raylet import PlacementGroupID
from ray.util import placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from raytrain_opt.errors import JobError, PoolError, Problem

_REACH_S = 5.0
_NO_PLACES = ("auto", "local")  # which Ray looks up itself


def check_address(address: str | None) -> None:
    """Raises JobError unless something answers at the address given, or at RAY_ADDRESS.

    Ray itself would try for a minute, and then end this process without an exception.
    """
    given = address or os.environ.get("RAY_ADDRESS")
    if ray.is_initialized() or not given or given in _NO_PLACES:
        return
    place = urlsplit(given if "://" in given else f"//{given}")
    if place.scheme not in ("", "ray"):
        return
    try:
        if not place.hostname or not place.port:
            raise ValueError("it has no HOST:PORT")
        socket.create_connection((place.hostname, place.port), _REACH_S).close()
    except (OSError, ValueError) as error:
        raise JobError([_no_cluster(address, error)], "arguments") from error


def _no_cluster(address: str | None, error: Exception) -> Problem:
    field = "--address" if address else "RAY_ADDRESS"
    given = address or os.environ["RAY_ADDRESS"]
    rule = f"no Ray cluster can be reached there: {error}"
    hint = (
        "give HOST:PORT of its head, ray://HOST:PORT or auto; with token authentication it needs "
        "RAY_AUTH_MODE=token and the token"
    )
    return Problem(field, rule, repr(given), hint)


@contextmanager
def ray_session(address: str | None, *, verbose: bool) -> Iterator[bool]:
    """Inside, Ray is connected. Yields whether it was started by us (and is ended by us).

    Raises JobError when the address does not answer, PoolError when Ray does not start here.
    """
    if ray.is_initialized():
        yield False
        return
    local = not address and not os.environ.get("RAY_ADDRESS")
    _connect(address, local, verbose)
    try:
        yield local
    finally:
        ray.shutdown()


def _connect(address: str | None, local: bool, verbose: bool) -> None:
    options: dict[str, Any] = {"address": address or None}
    if local:
        options = {"include_dashboard": False}
    try:
        with _on_loopback() if local else nullcontext():
            ray.init(
                log_to_driver=verbose,
                logging_level=logging.INFO if verbose else logging.ERROR,
                configure_logging=True,
                **options,
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        if local:
            raise PoolError(f"Ray cannot be started on this machine: {error}") from error
        raise JobError([_no_cluster(address, error)], "arguments") from error


@contextmanager
def _on_loopback() -> Iterator[None]:
    """A Ray started inside can be reached from this machine only.

    Ray listens on all interfaces unless its node's address is 127.0.0.1, and takes that for an
    address only where it has no clusters (on Windows and macOS): this is that switch.
    """
    clusters = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters


def alive_nodes() -> list[dict[str, Any]]:
    """Ray's description of each node that is alive."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]


def gone_nodes() -> dict[str, str]:
    """Address of each node that has left the cluster, by Ray's identity of it."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if not node["Alive"]}


def cpu_count() -> float:
    """Cores of the whole cluster."""
    return sum(float(node["Resources"].get("CPU", 0.0)) for node in alive_nodes())


def free_resources() -> list[dict[str, float]]:
    """Resources of each node that is alive."""
    return [dict(node["Resources"]) for node in alive_nodes()]


def placement_groups() -> set[str]:
    """Those of this driver that hold or wait for resources, by hexadecimal identity."""
    job = ray.get_runtime_context().get_job_id()
    table: dict[str, dict[str, Any]] = placement_group_table()
    # An identity ends with that of the Ray job that made it.
    return {name for name, at in table.items() if name.endswith(job) and at["state"] != "REMOVED"}


def remove_placement_groups(names: set[str]) -> None:
    """Give back what they hold."""
    for name in names:
        remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(name)))
