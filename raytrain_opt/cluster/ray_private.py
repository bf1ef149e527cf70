"""Everything this package uses of Ray that Ray does not document, in one place.

Each function names what it relies on; `tests/unit/cluster/test_ray_private.py` fails when a new
version of Ray no longer has it. Checked with Ray 2.60.
"""

from __future__ import annotations

import os
import signal
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray import cloudpickle
from ray._private import ray_constants, services, utils, worker
from ray._private.client_mode_hook import client_mode_wrap
from ray._private.node import Node
from ray._raylet import PlacementGroupID
from ray.job_config import JobConfig
from ray.util.placement_group import PlacementGroup, remove_placement_group

from raytrain_opt.clock import monotonic_s

if TYPE_CHECKING:
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer


@dataclass(frozen=True)
class ActorRecord:
    """One actor of the cluster, dead or alive, with hexadecimal identities."""

    id: str
    class_name: str
    is_dead: bool
    worker_id: str  # of its process, "" before it has one
    owner_worker_id: str  # of the process that created it
    node_id: str
    pid: int


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Give an attribute another value for the time of the block."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def root_cause(error: BaseException) -> tuple[int | None, BaseException]:
    """Return the exception that Ray wrapped, and the rank of the worker that raised it, if any."""
    rank = None
    while True:
        if failures := getattr(error, "worker_failures", None):  # of Ray Train, by rank
            rank = min(failures)
            error = failures[rank]
        names = ("cause", "client_exc", "_base_exc", "controller_failure")
        inner = (getattr(error, name, None) for name in names)
        wrapped = next((value for value in inner if isinstance(value, BaseException)), None)
        if wrapped is None:
            return rank, error
        error = wrapped


@contextmanager
def as_local_node(limit_s: float) -> Iterator[None]:
    """Let a Ray that is started inside the block serve this machine alone.

    Ray listens on all interfaces unless its node's address is 127.0.0.1, and accepts that address
    only where it supports no clusters: `ENABLE_RAY_CLUSTER` is that switch. Signals to the
    driver's process group (of `timeout`, Slurm and systemd) do not reach it: the driver ends its
    pools by Ray's control service. It has no API server, and may take `limit_s` to start. Raises
    ChildProcessError as soon as one of its processes has ended: a raylet ends if its agents take
    15 s to start.
    """
    get_node: Any = services.get_node
    popen: Any = services.ConsolePopen
    processes: list[Any] = []

    def start(*arguments: Any, **options: Any) -> Any:
        processes.append(popen(*arguments, **options, process_group=0))
        return processes[-1]

    def wait(*arguments: Any) -> Any:
        deadline_s = monotonic_s() + limit_s
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:  # the node has not registered yet
                ended = any(process.poll() is not None for process in processes)
                if not ended and monotonic_s() < deadline_s:
                    time.sleep(0.1)
                    continue
                while processes:
                    processes.pop().kill()
                if ended:
                    raise ChildProcessError("one of its processes has ended") from None
                raise

    with (
        _replaced(ray_constants, "ENABLE_RAY_CLUSTER", False),
        _replaced(services, "ConsolePopen", start),
        _replaced(Node, "start_api_server", _do_nothing),
        _replaced(services, "get_node", wait),
    ):
        yield


def with_python_path(entries: Sequence[str]) -> JobConfig:
    """Return the configuration of a job whose processes import from these folders, too.

    Such as those that a script added to `sys.path`. Ray puts each folder before the ones before
    it, so they go last to first, and without those that every interpreter has.
    """
    everywhere = {sysconfig.get_path(n) for n in ("stdlib", "platstdlib", "purelib", "platlib")}
    own = [e for e in map(os.path.abspath, entries) if e not in everywhere and os.path.isdir(e)]
    return JobConfig(_py_driver_sys_path=own[::-1])


@contextmanager
def sigterm_handler_kept() -> Iterator[None]:
    """Keep the handler of SIGTERM where `ray.init` or `ray.shutdown` is called in the block.

    Ray's own one ends the process. Its C++ part sets another one at its start, and none at its
    end, after which Ray's processes are killed for up to ten seconds.
    """
    kill: Any = Node.kill_all_processes

    def kill_all_processes(*arguments: Any, **options: Any) -> Any:
        _set_python_handler()
        return kill(*arguments, **options)

    with (
        _replaced(utils, "set_sigterm_handler", _do_nothing),
        _replaced(Node, "kill_all_processes", kill_all_processes),
    ):
        yield
    _set_python_handler()


def _set_python_handler() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)


def log_folder() -> str:
    """Return the folder of the logs of a Ray that was started here."""
    node: Any = worker._global_node
    return str(node.get_logs_dir_path())


def ended_processes() -> list[str]:
    """Return which of the two processes have ended without which a Ray started here is over.

    Ray ends the driver after that: 16 s later, or a minute, without an exception.
    """
    node: Any = worker._global_node
    ended = [] if node is None else [name for name, _ in node.dead_processes()]
    return [name for name in ended if name in ("gcs_server", "raylet")]


def start_processes_with(program: str) -> AbstractContextManager[None]:
    """Let a Ray that is started inside the block run `program` in place of `setup_worker.py`.

    Ray joins the name of that file to a folder, so an absolute path replaces both. Should Ray
    rename it, its processes start as on a cluster.
    """
    if not hasattr(ray_constants, "SETUP_WORKER_FILENAME"):
        return nullcontext()
    return _replaced(ray_constants, "SETUP_WORKER_FILENAME", program)


def _do_nothing(*_: Any, **__: Any) -> None:
    """Take the place of a method that starts a process or sets a handler of signals."""


def actor_id(actor: Any) -> str:
    """Return the identity of the actor behind a handle."""
    return str(actor._actor_id.hex())


# The documented `ray.util.state.list_actors` needs the API server, which a local Ray here
# does without; `ray.util.placement_group_table` leaves out who created a group.
@client_mode_wrap  # type: ignore[untyped-decorator, unused-ignore]
def read_actors() -> list[ActorRecord]:
    """Return every actor that Ray's control service knows, dead ones included.

    Detached actors are left out: they belong to the cluster, not to who happened to create them
    (Ray Train's first controller creates the cluster's `_AutoscalingCoordinatorActor`).
    """
    from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]

    table = map(ActorTableData.FromString, _accessor().get_actor_table(None, None))
    return [
        ActorRecord(
            actor.actor_id.hex(),
            actor.class_name,
            actor.state == ActorTableData.DEAD,
            _hex(actor.address.worker_id),
            _hex(actor.owner_address.worker_id),
            _hex(actor.address.node_id),
            actor.pid,
        )
        for actor in table
        if not actor.is_detached
    ]


@client_mode_wrap  # type: ignore[untyped-decorator, unused-ignore]
def read_placement_groups() -> dict[str, str]:
    """Return the actor that created each placement group that is not removed; "" for a driver."""
    from ray.core.generated.gcs_pb2 import PlacementGroupTableData  # type: ignore[attr-defined]

    table = map(PlacementGroupTableData.FromString, _accessor().get_placement_group_table())
    return {
        group.placement_group_id.hex(): _hex(group.creator_actor_id)
        for group in table
        if group.state != PlacementGroupTableData.REMOVED
    }


@client_mode_wrap  # type: ignore[untyped-decorator, unused-ignore]
def available_resources_per_node() -> dict[str, dict[str, float]]:
    """Return what nobody holds, by the identity of the node."""
    from ray._private.state import state

    free: dict[str, dict[str, float]] = state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return free


@client_mode_wrap  # type: ignore[untyped-decorator, unused-ignore]
def draining_nodes() -> set[str]:
    """Return the identities of the nodes that will be taken away."""
    from ray._private.state import state

    return set(state.get_draining_nodes())


def _hex(identity: bytes) -> str:
    """Return an identity in hexadecimal; "" for Ray's nil, which is empty or all ones."""
    return identity.hex() if identity.strip(b"\xff") else ""


def _accessor() -> Any:
    from ray._private.state import state

    return state._connect_and_get_accessor()


def remove_placement_group_by_id(group_id: str) -> None:
    """Give back what a placement group holds; does nothing when it is gone already."""
    remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(group_id)))


def dump_command(value: object) -> bytes:
    """Pickle a value with references for a process that another one keeps their objects for.

    `ray.cloudpickle` would keep each object for as long as this process lives.
    """
    this_worker: Any = worker.global_worker
    context = this_worker.get_serialization_context()
    context.set_in_band_serialization()
    try:
        content: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    finally:
        context.set_out_of_band_serialization()
        context.get_and_clear_contained_object_refs()
    return content


def without_idle_actors(trainer: DataParallelTrainer) -> DataParallelTrainer:
    """Return the trainer; its `fit` starts no cleaner of placement groups and no manager of data.

    Ray Train's cleaner is a detached actor, which outlives a run that is ended, and needs the API
    server; `cluster.actor_tree` removes the groups. Its manager serves Datasets of Ray Data, of
    which we give it none. Should Ray rename the method, both start.
    """
    idle = ("PlacementGroupCleanerCallback", "DatasetsCallback")
    if (create := getattr(trainer, "_create_default_callbacks", None)) is not None:
        replaced: Any = trainer
        replaced._create_default_callbacks = lambda: [
            callback for callback in create() if type(callback).__name__ not in idle
        ]
    return trainer
