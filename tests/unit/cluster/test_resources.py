"""Which resources the pools ask for, and whether they fit: worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain_opt.cluster.resources import PoolPlan, plan_pools
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import JobError, ResourcesError

LAPTOP = {"CPU": 2.0, "memory": 8e9}
ONE_GPU = {"CPU": 16.0, "GPU": 1.0}
TWO_GPUS = {"CPU": 16.0, "GPU": 2.0}


def plan(
    *nodes: dict[str, float],
    candidates: int = 4,
    workers: dict[str, Any] | int = 2,
    slots: dict[str, Any] | None = None,
    search_on: str = "slots",
    mode: str = "sync",
) -> PoolPlan:
    section = {"count": workers} if isinstance(workers, int) else workers
    job = Job.model_validate(
        {
            "model": "small_cnn",
            "data": "digits",
            "epochs": 1,
            "global_batch_size": 960,
            "workers": section,
            "slots": slots or {},
            "parallel": {"mode": mode},
            "learning_rate": {"policy": "stpt_horizon", "search_on": search_on},
        }
    )
    return plan_pools(job, job.slot_candidates and candidates, nodes)


def test_quickstart_on_two_cores_has_two_slots() -> None:
    pool_plan = plan(LAPTOP)
    assert pool_plan.worker_resources == {"CPU": 0.6}
    assert pool_plan.slot_resources == {"CPU": 0.4}
    assert (pool_plan.workers, pool_plan.slots, pool_plan.slots_per_node, pool_plan.use_gpu) == (
        2,
        2,
        2,
        False,
    )


def test_on_one_core_the_fractions_shrink_so_that_both_pools_fit() -> None:
    pool_plan = plan({"CPU": 1.0}, workers=3)
    assert pool_plan.worker_resources["CPU"] == pytest.approx(0.2, abs=2e-3)
    assert pool_plan.slot_resources["CPU"] == pytest.approx(0.4 / 3, abs=2e-3)
    assert pool_plan.slots >= 1


@pytest.mark.parametrize(("count", "slots"), [(None, 4), (1, 1), (3, 3), (9, 4)])
def test_with_room_for_all_there_is_a_slot_for_each_candidate_up_to_the_given_count(
    count: int | None, slots: int
) -> None:
    assert plan({"CPU": 16.0}, slots={"count": count}).slots == slots


# GPUs are devices: a fraction comes from one of them.


def test_worker_and_slot_share_a_gpu() -> None:
    pool_plan = plan(ONE_GPU, workers=1)
    assert pool_plan.worker_resources == {"CPU": 0.6, "GPU": 0.6}
    assert pool_plan.slot_resources == {"CPU": 0.4, "GPU": 0.4}
    assert (pool_plan.use_gpu, pool_plan.slots) == (True, 1)
    assert (plan(ONE_GPU, ONE_GPU).slots, plan(ONE_GPU, ONE_GPU).slots_per_node) == (2, 1)


@pytest.mark.parametrize(
    ("workers", "nodes", "room"),
    [(2, [ONE_GPU], 1), (3, [TWO_GPUS], 2), (3, [ONE_GPU, ONE_GPU], 2)],
)
def test_two_workers_never_land_on_one_gpu(
    workers: int, nodes: list[dict[str, float]], room: int
) -> None:
    message = rf"{workers} workers of 0\.6 CPU, 0\.6 GPU each do not fit: room for {room} on"
    with pytest.raises(ResourcesError, match=message):
        plan(*nodes, workers=workers)


def test_fractions_left_on_several_gpus_do_not_add_up() -> None:
    """0.3 + 0.3 of two devices are free, but no device has the 0.4 that a slot takes."""
    workers = {"count": 2, "resources": {"GPU": 0.7}}
    with pytest.raises(ResourcesError, match=r"not even one slot of 0\.4 CPU, 0\.4 GPU fits"):
        plan(TWO_GPUS, workers=workers)
    assert plan(TWO_GPUS, workers=workers, slots={"resources": {"GPU": 0.3}}).slots == 2


def test_integer_gpu_requests_are_complete_devices() -> None:
    workers = {"count": 1, "resources": {"GPU": 1}}
    assert plan(TWO_GPUS, workers=workers, slots={"resources": {"GPU": 1}}).slots == 1
    assert plan(TWO_GPUS, workers=workers, slots={"resources": {"GPU": 0.5}}).slots == 2
    with pytest.raises(ResourcesError, match="room for 0"):
        plan(ONE_GPU, ONE_GPU, workers={"count": 1, "resources": {"GPU": 2}})


def test_gpus_are_used_only_if_requested_and_available() -> None:
    assert plan(ONE_GPU, workers={"count": 1, "use_gpu": False}).worker_resources == {"CPU": 0.6}
    assert plan(ONE_GPU, workers={"count": 1, "use_gpu": True}).use_gpu
    with pytest.raises(ResourcesError, match="no node has a free one .*use_gpu: false"):
        plan(LAPTOP, workers={"count": 1, "use_gpu": True})


# Explicit resources, several nodes, and what an error says.


@pytest.mark.parametrize("section", ["workers", "slots"])
def test_a_pool_that_must_have_a_gpu_and_asks_for_none(section: str) -> None:
    workers: dict[str, Any] = {"count": 1, "use_gpu": True}
    cpu_only = {"resources": {"CPU": 1}}
    sections: dict[str, Any] = {"workers": workers, "slots": {}}
    sections[section] = sections[section] | cpu_only
    with pytest.raises(ResourcesError, match=rf"{section}\.resources: the job trains on GPUs"):
        plan(ONE_GPU, **sections)


def test_nodes_are_filled_one_by_one_not_summed() -> None:
    """Two nodes of 1.5 CPUs hold two workers of 1, not three."""
    nodes = ({"CPU": 1.5}, {"CPU": 1.5})
    workers = {"count": 2, "resources": {"CPU": 1}}
    pool_plan = plan(*nodes, workers=workers, slots={"resources": {"CPU": 0.5}})
    assert (pool_plan.slots, pool_plan.slots_per_node) == (2, 1)
    with pytest.raises(ResourcesError, match=r"room for 2 on 2 nodes \(1\.5 CPU; 1\.5 CPU\)"):
        plan(*nodes, workers={**workers, "count": 3})


def test_an_error_says_what_is_there_and_what_to_change() -> None:
    with pytest.raises(ResourcesError) as error:
        plan(LAPTOP, workers={"count": 2, "resources": {"CPU": 1}})
    text = str(error.value)
    assert "not even one slot of 0.4 CPU fits beside 2 workers of 1 CPU on 1 node (2 CPU)" in text
    for way_out in ("slots.resources", "workers.resources", "fewer workers", "search_on: workers"):
        assert way_out in text


def test_a_group_that_may_be_smaller_starts_with_what_there_is() -> None:
    def elastic(smallest: int) -> dict[str, Any]:
        return {"count": {"min": smallest, "max": 4}, "resources": {"CPU": 1.0}}

    pool_plan = plan(LAPTOP, candidates=0, workers=elastic(2))
    assert (pool_plan.workers, pool_plan.placed_workers) == (4, 2)
    with pytest.raises(ResourcesError, match="room for 2"):
        plan(LAPTOP, candidates=0, workers=elastic(3))


def test_many_asynchronous_workers_are_refused_with_the_reason() -> None:
    job: dict[str, Any] = {"model": "small_cnn", "data": "digits", "epochs": 1}
    job["global_batch_size"] = 514
    job |= {"workers": {"count": 257}}
    many = Job.model_validate({**job, "parallel": {"mode": "async"}})
    with pytest.raises(JobError, match=r"workers\.count: at most 256 with async, each of which"):
        plan_pools(many, 0, [{"CPU": 1000.0}])
    assert plan_pools(Job.model_validate(job), 0, [{"CPU": 1000.0}]).workers == 257


# Without slots.

EIGHT_GPUS = {"CPU": 64.0, "GPU": 8.0}


@pytest.mark.parametrize("candidates", [0, 3])
def test_without_slots_a_worker_takes_a_complete_gpu(candidates: int) -> None:
    pool_plan = plan(EIGHT_GPUS, workers=8, candidates=candidates, search_on="workers")
    assert pool_plan.slots == 0
    assert pool_plan.worker_resources == {"CPU": 0.6, "GPU": 1.0}
    asked = {"count": 8, "resources": {"GPU": 0.6}}
    assert plan(EIGHT_GPUS, workers=asked, candidates=0).worker_resources == {"GPU": 0.6}


@pytest.mark.parametrize(
    ("nodes", "workers", "count"),
    [
        ([LAPTOP], {}, 1),
        ([ONE_GPU], {}, 1),
        ([EIGHT_GPUS], {}, 8),
        ([EIGHT_GPUS, TWO_GPUS], {}, 10),
        ([EIGHT_GPUS, EIGHT_GPUS, TWO_GPUS], {}, 16),  # 18 and 17 do not divide 960
        ([EIGHT_GPUS], {"use_gpu": False}, 1),
        ([EIGHT_GPUS], {"resources": {"CPU": 1}}, 1),
        ([EIGHT_GPUS], {"resources": {"GPU": 2}}, 4),
        ([EIGHT_GPUS], {"count": 3}, 3),
    ],
)
def test_by_default_there_is_a_worker_for_each_gpu(
    nodes: list[dict[str, float]], workers: dict[str, Any], count: int
) -> None:
    for search_on in ("workers", "slots"):
        if search_on != "slots" or "resources" not in workers:
            assert plan(*nodes, workers=workers, search_on=search_on).workers == count


def test_only_asynchronous_workers_may_share_a_gpu() -> None:
    workers = {"count": 2, "resources": {"GPU": 0.5}}
    with pytest.raises(ResourcesError, match="NCCL needs a GPU for each"):
        plan(TWO_GPUS, workers=workers, candidates=0)
    workers["resources"] = {"GPU": 0.6}
    assert plan(TWO_GPUS, workers=workers, candidates=0).workers == 2
    workers["resources"] = {"GPU": 0.3}
    assert plan(ONE_GPU, workers=workers, mode="async").workers == 2
