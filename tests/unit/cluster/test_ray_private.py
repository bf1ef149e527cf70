"""Fails when a new version of Ray no longer has what `cluster.ray_private` relies on."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import ray
from ray._private import ray_constants, state
from ray.core.generated.gcs_pb2 import ActorTableData, PlacementGroupTableData
from ray.train.backend import Backend
from ray.train.torch import TorchConfig
from ray.train.v2.api import data_parallel_trainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

import raytrain_opt
from raytrain_opt.cluster import ray_private


def test_the_switch_to_the_loopback_address_exists_and_is_put_back() -> None:
    """Ray's own code reads it where it chooses the address of a node."""
    assert ray_constants.ENABLE_RAY_CLUSTER is True
    with ray_private.loopback_only():
        assert ray_constants.ENABLE_RAY_CLUSTER is False
    assert ray_constants.ENABLE_RAY_CLUSTER is True
    from ray._private import services

    assert "ENABLE_RAY_CLUSTER" in inspect.getsource(services)


def test_the_tables_of_actors_and_groups_have_the_fields_that_are_read() -> None:
    actor = ActorTableData.DESCRIPTOR.fields_by_name
    needed = {"actor_id", "class_name", "state", "address", "owner_address", "pid", "is_detached"}
    assert needed <= set(actor)
    address = actor["address"].message_type.fields_by_name
    assert {"worker_id", "node_id"} <= set(address)
    group = PlacementGroupTableData.DESCRIPTOR.fields_by_name
    needed = {"placement_group_id", "creator_actor_id", "creator_job_id", "state"}
    assert needed <= set(group)
    assert ActorTableData.DEAD != ActorTableData.ALIVE
    assert PlacementGroupTableData.REMOVED != PlacementGroupTableData.CREATED
    assert callable(state.state._connect_and_get_accessor)
    from ray._raylet import GlobalStateAccessor

    assert callable(GlobalStateAccessor.get_actor_table)
    assert callable(GlobalStateAccessor.get_placement_group_table)


def test_an_actor_handle_has_an_identity() -> None:
    assert "_actor_id" in inspect.getsource(ray.actor.ActorHandle.__init__)


@pytest.mark.parametrize("nil", [b"", b"\xff" * 28])
def test_a_nil_identity_is_no_identity(nil: bytes) -> None:
    assert ray_private._hex(nil) == ""
    assert ray_private._hex(b"\x01\xff") == "01ff"


def test_ray_train_starts_the_helpers_that_are_left_out() -> None:
    source = inspect.getsource(DataParallelTrainer._create_default_callbacks)
    for name in ray_private.UNUSED_TRAIN_CALLBACKS:
        assert name in source
        assert hasattr(data_parallel_trainer, name)
    assert "_create_default_callbacks()" in inspect.getsource(DataParallelTrainer.fit)


def test_a_trainer_is_left_with_the_other_callbacks() -> None:
    class DatasetsCallback: ...

    class Other: ...

    class Trainer:
        def _create_default_callbacks(self) -> list[object]:
            return [DatasetsCallback(), Other()]

    trainer = Trainer()
    ray_private.drop_unused_callbacks(trainer)  # type: ignore[arg-type]
    assert [type(callback).__name__ for callback in trainer._create_default_callbacks()] == [
        "Other"
    ]
    ray_private.drop_unused_callbacks(object())  # type: ignore[arg-type]


def test_no_other_module_uses_what_ray_does_not_document() -> None:
    """Import-linter does not see the modules of an external package."""
    package = Path(raytrain_opt.__file__).parent
    undocumented = re.compile(
        r"\bray\._(?!_)|ray\.core\.generated|_create_default_callbacks|\._actor_id\b"
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
