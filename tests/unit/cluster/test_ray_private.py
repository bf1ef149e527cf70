"""Fails when a new version of Ray no longer has what `cluster.ray_private` relies on."""

from __future__ import annotations

import inspect
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from ray._private import node, ray_constants, services, state
from ray._private.node import Node
from ray.core.generated.gcs_pb2 import ActorTableData, PlacementGroupTableData
from ray.train.backend import Backend
from ray.train.torch import TorchConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

import raytrain_opt
from raytrain_opt.cluster import ray_private


@pytest.mark.parametrize(
    ("owner", "name", "user"),
    [
        (ray_constants, "ENABLE_RAY_CLUSTER", services),
        (Node, "start_api_server", Node),
        (services, "get_node", Node.__init__),
        (services, "ConsolePopen", services.start_ray_process),
        (ray_constants, "SETUP_WORKER_FILENAME", node),
    ],
)
def test_what_is_replaced_while_ray_starts_exists_is_used_and_is_put_back(
    owner: Any, name: str, user: Any
) -> None:
    before = getattr(owner, name)
    with ray_private.as_local_node(0), ray_private.start_processes_with("/folder/program.py"):
        assert getattr(owner, name) != before
    assert getattr(owner, name) == before
    assert name in inspect.getsource(user)


def test_the_start_of_the_local_node_is_waited_for_longer_than_ray_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def registers_at_the_third_call(address: str, node_id: str) -> str:
        calls.append(node_id)
        if len(calls) < 3:
            raise RuntimeError("no such node")
        return address

    monkeypatch.setattr(services, "get_node", registers_at_the_third_call)
    with ray_private.as_local_node(60):
        assert services.get_node("address", "node") == "address"
    calls.clear()
    with ray_private.as_local_node(0), pytest.raises(RuntimeError, match="no such node"):
        services.get_node("address", "node")
    with ray_private.as_local_node(60):
        services.ConsolePopen(["true"]).wait()
        other = services.ConsolePopen(["sleep", "60"])
        with pytest.raises(ChildProcessError, match="has ended"):
            services.get_node("address", "node")
    assert other.wait() == -signal.SIGKILL


def test_rays_own_processes_get_a_process_group_of_their_own() -> None:
    with ray_private.as_local_node(0):
        process = services.ConsolePopen(["sleep", "60"])
    try:
        assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
    finally:
        process.kill()
        process.wait()


def test_the_program_that_starts_processes_has_the_form_that_is_replaced() -> None:
    """Ray joins its name to a folder, and an absolute path replaces both."""
    joined = r"os\.path\.join\([^=]*ray_constants\.SETUP_WORKER_FILENAME,\s*\)"
    assert re.search("setup_worker_path=" + joined, inspect.getsource(node))
    workers = Path(node.__file__).parent / "workers"
    assert (workers / "setup_worker.py").is_file(), "what `fork_client` runs where it cannot fork"
    assert (workers / "default_worker.py").is_file()


def test_the_tables_of_actors_and_groups_have_the_fields_that_are_read() -> None:
    actor = ActorTableData.DESCRIPTOR.fields_by_name
    needed = {"actor_id", "class_name", "state", "address", "owner_address", "pid", "is_detached"}
    assert needed <= set(actor)
    address = actor["address"].message_type.fields_by_name
    assert {"worker_id", "node_id"} <= set(address)
    group = PlacementGroupTableData.DESCRIPTOR.fields_by_name
    needed = {"placement_group_id", "creator_actor_id", "state"}
    assert needed <= set(group)
    assert ActorTableData.DEAD != ActorTableData.ALIVE
    assert PlacementGroupTableData.REMOVED != PlacementGroupTableData.CREATED
    assert callable(state.state._connect_and_get_accessor)
    from ray._raylet import GlobalStateAccessor

    assert callable(GlobalStateAccessor.get_actor_table)
    assert callable(GlobalStateAccessor.get_placement_group_table)


def test_ray_train_starts_the_actors_that_are_left_out() -> None:
    source = inspect.getsource(DataParallelTrainer._create_default_callbacks)
    assert {"PlacementGroupCleanerCallback", "DatasetsCallback"} <= {*re.findall(r"\w+", source)}
    assert "_create_default_callbacks()" in inspect.getsource(DataParallelTrainer.fit)


def test_a_trainer_has_its_other_callbacks() -> None:
    class PlacementGroupCleanerCallback: ...

    class Other: ...

    class Trainer:
        def _create_default_callbacks(self) -> list[object]:
            return [PlacementGroupCleanerCallback(), Other()]

    trainer: Any = ray_private.without_idle_actors(Trainer())  # type: ignore[arg-type]
    assert [type(callback) for callback in trainer._create_default_callbacks()] == [Other]
    renamed: Any = object()
    assert ray_private.without_idle_actors(renamed) is renamed


def test_processes_import_from_the_folders_of_the_driver(tmp_path: Path) -> None:
    """Ray inserts each folder at the front; those of every interpreter are left out."""
    entries = [str(tmp_path), "", str(tmp_path / "gone"), os.path.dirname(pytest.__path__[0])]
    config = ray_private.with_python_path([*entries, os.path.dirname(os.__file__)])
    assert config._py_driver_sys_path == [os.getcwd(), str(tmp_path)]
    assert [*config._get_proto_job_config().py_driver_sys_path] == [os.getcwd(), str(tmp_path)]


def test_ray_keeps_no_object_for_a_reference_in_a_command() -> None:
    """In a serialization "in band" it notes the references, and does nothing else."""
    from ray._private.serialization import SerializationContext
    from ray._private.worker import Worker

    kept = inspect.getsource(SerializationContext.add_contained_object_ref)
    assert re.search(
        r"if self.is_in_band_serialization\(\):(?s:.)*else:(?s:.)*add_object_ref", kept
    )
    for name in ("set_in_band", "set_out_of_band"):
        assert callable(getattr(SerializationContext, f"{name}_serialization"))
    assert callable(SerializationContext.get_and_clear_contained_object_refs)
    assert callable(Worker.get_serialization_context)


def test_no_other_module_uses_what_ray_does_not_document() -> None:
    """Import-linter does not see the modules of an external package."""
    package = Path(raytrain_opt.__file__).parent
    undocumented = re.compile(
        r"\bray\._(?!_)|ray\.core\.generated|_create_default_callbacks|v2\._internal|class_cache|\._actor_id\b"
    )
    users = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if undocumented.search(path.read_text(encoding="utf-8"))
    }
    assert users == {"cluster/ray_private.py"}


def test_a_backend_can_request_that_each_worker_is_restarted_alone() -> None:
    assert Backend.has_replica_groups is False
    assert isinstance(inspect.getattr_static(TorchConfig, "backend_cls"), property)


def test_without_the_hook_of_the_fork_server_ray_starts_its_processes_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(ray_constants, "SETUP_WORKER_FILENAME")
    with ray_private.start_processes_with("/folder/program.py"):
        assert not hasattr(ray_constants, "SETUP_WORKER_FILENAME")
