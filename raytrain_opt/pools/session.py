"""Connect to Ray, or start it on this machine, quietly; and leave it as it was found."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray._raylet import PlacementGroupID
from ray.util import placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from raytrain_opt.errors import PoolError


@contextmanager
def ray_session(address: str | None, *, verbose: bool) -> Iterator[bool]:
    """Inside, Ray is connected. Yields whether it was started by us (and is ended by us).

    Raises PoolError when the address does not answer.
    """
    if ray.is_initialized():
        yield False
        return
    local = address is None and "RAY_ADDRESS" not in os.environ
    _connect(address, local, verbose)
    try:
        yield local
    finally:
        ray.shutdown()


def _connect(address: str | None, local: bool, verbose: bool) -> None:
    options: dict[str, Any] = {"include_dashboard": False} if local else {"address": address}
    try:
        ray.init(
            log_to_driver=verbose,
            logging_level=logging.INFO if verbose else logging.ERROR,
            configure_logging=True,
            **options,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise PoolError(
            f"Ray cannot be reached at {address or os.environ.get('RAY_ADDRESS', 'local')}: "
            f"{error}. Is the cluster up, the address right, and, with token authentication, "
            "RAY_AUTH_MODE=token and the token set?"
        ) from error


def alive_nodes() -> list[dict[str, Any]]:
    """Ray's description of each node that is alive."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]


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
