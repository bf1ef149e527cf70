"""Connect to a Ray cluster, or start Ray on this machine; look at its nodes and their notices."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.util import placement_group, remove_placement_group

from raytrain_opt.clock import monotonic_s
from raytrain_opt.cluster import fork_client
from raytrain_opt.cluster.fork_server import fork_server
from raytrain_opt.cluster.ray_private import (
    as_local_node,
    available_resources_per_node,
    draining_nodes,
    ended_processes,
    sigterm_handler_kept,
    start_processes_with,
    with_python_path,
)
from raytrain_opt.errors import JobError, PoolError, Problem
from raytrain_opt.temporary import TemporaryFolder

# A head node that is up accepts a connection within milliseconds, also across continents.
_CONNECT_LIMIT_S = 5.0
# Ray starts in 3 s on an idle machine, in 30 s where ten other processes want each core.
_START_LIMIT_S = 120.0
# A socket's path has at most 107 bytes. Ray's are r/session_DATE_TIME_PID/sockets/plasma_store.
_LONGEST_RAY_FOLDER = 107 - 66
_MAILBOX = "the mailbox, the process through which driver, workers and slots talk,"
# What the mailbox answers at once takes milliseconds; minutes on a node that swaps.
_ANSWER_S = 300.0
_LOOK_S = 1.0  # whether Ray itself is alive
# How often to look for notices of preemption, which clouds give 30 to 120 s before.
_NOTICE_POLL_S = 5.0
_SYMBOLIC_ADDRESSES = ("auto", "local")  # Ray resolves them itself


def check_address(address: str | None) -> None:
    """Raise JobError unless something accepts connections at the address, or at RAY_ADDRESS.

    Ray itself would try for a minute, and then end this process without an exception.
    """
    target = address or os.environ.get("RAY_ADDRESS")
    if ray.is_initialized() or not target or target in _SYMBOLIC_ADDRESSES:
        return
    url = urlsplit(target if "://" in target else f"//{target}")
    if url.scheme not in ("", "ray", "http", "https"):
        return
    try:
        if url.scheme in ("http", "https"):
            submit = f"ray job submit --address {target} --working-dir . -- python -m raytrain_opt"
            raise ValueError(f"it is the URL of a dashboard, for: {submit} …")
        if not url.hostname or not url.port:
            raise ValueError("it has no HOST:PORT")
        socket.create_connection((url.hostname, url.port), _CONNECT_LIMIT_S).close()
    except (OSError, ValueError) as error:
        raise JobError([_unreachable(address, error)], "arguments") from error


def _unreachable(address: str | None, error: Exception) -> Problem:
    field = "--address" if address else "RAY_ADDRESS"
    target = address or os.environ["RAY_ADDRESS"]
    rule = f"no Ray cluster can be reached there: {error}"
    hint = (
        "give HOST:PORT of its head, ray://HOST:PORT or auto; with token authentication it needs "
        "RAY_AUTH_MODE=token and the token"
    )
    return Problem(field, rule, repr(target), hint)


@contextmanager
def ray_session(
    address: str | None, *, verbose: bool, environment: Mapping[str, str] | None = None
) -> Iterator[bool]:
    """Connect to Ray for the time of the block; yield whether Ray was started here.

    A Ray that was started here has `environment` in all its processes, and is shut down; a
    connection that existed before stays. Raises JobError when nothing answers at the address,
    PoolError when Ray does not start.
    """
    if ray.is_initialized():
        yield False
        return
    local = not address and not os.environ.get("RAY_ADDRESS")
    with ExitStack() as after, ExitStack() as stack:
        with _local_node(environment or {}) if local else nullcontext():
            folder = _connect(address, local, verbose, stack)
        if folder is not None:
            after.callback(folder.remove)
        yield local


@contextmanager
def _local_node(environment: Mapping[str, str]) -> Iterator[None]:
    """Let a Ray that is started inside the block serve this run on this machine, and no more.

    Its processes inherit `environment`. As a runtime environment of an actor, the same variables
    would cost every process half a second, and Ray's waiting processes could not be used.
    """
    saved = dict(os.environ)
    os.environ.update(environment)
    try:
        with as_local_node(_START_LIMIT_S), start_processes_with(fork_client.__file__):
            yield
    finally:
        # What we and Ray set, no others: another thread calls user code meanwhile.
        names = {n for n in os.environ if n.startswith("RAY")} | environment.keys()
        names.add("PYTHONBREAKPOINT")
        for name in names:
            os.environ.pop(name, None)
        os.environ.update((name, saved[name]) for name in names & saved.keys())


def _connect(
    address: str | None, local: bool, verbose: bool, stack: ExitStack
) -> TemporaryFolder | None:
    """Connect; return the folder of a Ray that was started here, to be removed after its end."""
    options: dict[str, Any] = {"address": address or None}
    folder: TemporaryFolder | None = None
    try:
        if local:
            folder = TemporaryFolder(_LONGEST_RAY_FOLDER)
            options = {"address": "local", "include_dashboard": False}
            options["job_config"] = with_python_path(sys.path)
            options["_temp_dir"] = str(folder.path / "r")  # Ray lets everybody write into it
            os.environ.update(stack.enter_context(fork_server()))
        stack.callback(_shut_down)
        with sigterm_handler_kept():
            options["log_to_driver"] = verbose
            options["logging_level"] = logging.INFO if verbose else logging.ERROR
            try:
                ray.init(**options)
            except ChildProcessError:  # the files that took too long are in memory now
                ray.init(**options)
        # Nobody else may read the token that Ray has made, with a mode by the umask.
        with suppress(OSError):  # there is none, as usual, or it is not ours
            (Path.home() / ".ray" / "auth_token").chmod(0o600)
    except Exception as error:  # Ray raises a bare Exception when its own start takes too long
        if local:
            logs = f"; otherwise see {folder.path}/r/session_latest/logs" if folder else ""
            if folder:
                folder.keep()
            raise PoolError(
                f"Ray cannot be started on this machine: {str(error).rstrip('.')}. If a path is "
                f"too long, set TMPDIR to a shorter path; if the machine is busy, try again{logs}."
            ) from error
        if not isinstance(error, ConnectionError | RuntimeError | ValueError):
            raise
        raise JobError([_unreachable(address, error)], "arguments") from error
    return folder


def _shut_down() -> None:
    with sigterm_handler_kept():
        ray.shutdown()


def raise_if_ray_ended() -> None:
    """Raise PoolError when a Ray that was started here has lost a process that it cannot replace.

    Its own driver would wait, and end later without a message.
    """
    if ended := ended_processes():
        names = " and ".join(ended)
        raise PoolError(f"Ray's process {names} has ended (killed, or out of memory?)")


def answer(ref: Any, name: str = _MAILBOX, limit_s: float = _ANSWER_S) -> Any:
    """Wait for an answer of an actor, or several. Raises PoolError when it has died or is hung."""
    deadline_s = monotonic_s() + limit_s
    while True:
        try:
            return ray.get(ref, timeout=min(_LOOK_S, limit_s))
        except ray.exceptions.GetTimeoutError as error:
            raise_if_ray_ended()
            if monotonic_s() < deadline_s:
                continue
            raise PoolError(
                f"{name} did not answer within {limit_s:g} s (its node is overloaded or hung?)"
            ) from error
        except ray.exceptions.RayActorError as error:
            raise_if_ray_ended()
            text = f"{name} has died (killed, or its node went down?): {error}"
            raise PoolError(text) from error


def alive_nodes() -> list[dict[str, Any]]:
    """Return Ray's description of each node that is alive."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]


def on_driver_node() -> dict[str, str]:
    """Return the label selector of actors that must not die with another node; for the driver."""
    return {"ray.io/node-id": ray.get_runtime_context().get_node_id()}


def gone_nodes() -> dict[str, str]:
    """Return the address of each node that has left the cluster, by Ray's identity of the node."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if not node["Alive"]}


def count_placeable(resources: Mapping[str, float], count: int, limit_s: float) -> int:
    """Return how many of `count` processes with these resources fit within `limit_s` seconds."""
    groups = [placement_group([dict(resources)]) for _ in range(count)]
    deadline_s = monotonic_s() + limit_s
    # Each further group is looked at at least once.
    limits_s = (max(0.1, deadline_s - monotonic_s()) for _ in groups)
    placed = sum(bool(group.wait(s)) for group, s in zip(groups, limits_s, strict=True))
    for group in groups:
        remove_placement_group(group)
    return placed


def total_resources() -> list[dict[str, float]]:
    """Return the resources of each node that is alive, whoever holds them."""
    return [dict(node["Resources"]) for node in alive_nodes()]


def free_resources() -> list[dict[str, float]]:
    """Return the resources of each living node that nobody holds, as Ray knew a moment ago."""
    free = available_resources_per_node()
    return [free.get(node["NodeID"], {}) for node in alive_nodes()]


@contextmanager
def watch_preemption(note: Callable[[str], None]) -> Iterator[None]:
    """Note which nodes will be taken away; end the run, as SIGTERM does, when it is this one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_watch_notices, args=(ended, note), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_NOTICE_POLL_S)


def _watch_notices(ended: threading.Event, note: Callable[[str], None]) -> None:
    here, known = ray.get_runtime_context().get_node_id(), set[str]()
    while not ended.wait(_NOTICE_POLL_S):
        draining: set[str] = set()
        # A control service that cannot be reached now.
        with suppress(ray.exceptions.RayError, RuntimeError):
            draining = draining_nodes()
        if here in draining:
            note("this node will be taken away: the run ends")
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if draining - known:
            nodes = "1 node" if len(draining) == 1 else f"{len(draining)} nodes"
            note(f"{nodes} will be taken away: processes there start elsewhere")
        known |= draining
