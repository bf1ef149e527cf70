"""Connect to Ray, or start it on this machine, quietly; and leave it as it was found."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from raytrain_opt.errors import PoolError

# Read by Ray when its parts are imported or started, so they are set before. A value that
# the user has set stays.
_ENVIRONMENT = {
    # Members keep the driver's working directory: data paths in a job are relative to it.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # We write records and TensorBoard events ourselves, one set for the whole run.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
    # How soon a pool notices that its members have left (seconds).
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
    # A slow start is limits.start_s' business, not Ray Train's 60 s.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",
}
_LOCAL_ENVIRONMENT = {
    # A machine of one's own is not preempted; this saves a process at the start.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@contextmanager
def ray_session(address: str | None, *, verbose: bool) -> Iterator[bool]:
    """Inside, Ray is connected. Yields whether it was started by us (and is ended by us).

    Raises PoolError when the address does not answer.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if ray.is_initialized():
        yield False
        return
    local = address is None and "RAY_ADDRESS" not in os.environ
    for name, value in _LOCAL_ENVIRONMENT.items() if local else ():
        os.environ.setdefault(name, value)
    _connect(address, local, verbose)
    if not verbose:
        _hush()
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


def _hush() -> None:
    for name in ("ray", "ray.tune", "ray.train", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)


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
