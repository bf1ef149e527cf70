"""What bounds a batch size, and what follows from a chosen one."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_opt import Job
from raytrain_opt.cluster.resources import plan_pools
from raytrain_opt.data.base import DataInfo
from raytrain_opt.errors import JobError
from raytrain_opt.execution.batch_size import find_batch_size, search_batch_size
from raytrain_opt.execution.resolve import Placement, settle
from raytrain_opt.execution.start import prober_config
from raytrain_opt.paths import RunPaths
from raytrain_opt.pools.programs import ResidentConfig
from raytrain_opt.recording.reader import read_record
from raytrain_opt.recording.records import BatchSizeProbeRecord, BatchSizeRecord
from raytrain_opt.search.batch_size.strategy import BatchSizeChoice, SizeBounds
from tests.support.synthetic_runs import probe_line

STPT = {"policy": "stpt", "initial": 0.1}


def job(search: Any = None, **changes: Any) -> Job:
    values = {
        "model": "small_cnn",
        "data": "digits",
        "epochs": 2,
        "global_batch_size": 64,
        "workers": {"count": 2},
        "learning_rate": STPT,
        "batch_size_search": {"strategy": "throughput_knee", **(search or {})},
    }
    return Job.model_validate({**values, **changes})


def settled(searched: Job, batch_size: int) -> Job:
    return settle(searched, Placement.from_job(searched), batch_size)


@pytest.mark.parametrize(("rule", "lr"), [("linear", 0.4), ("sqrt", 0.2), ("none", 0.1)])
@pytest.mark.parametrize("policy", [STPT, {"policy": "schedule", "initial": 0.1}])
def test_batch_and_rate_follow_the_choice(rule: str, lr: float, policy: Any) -> None:
    chosen = settled(job({"lr_rule": rule}, learning_rate=policy), 256)
    assert chosen.global_batch_size == 256
    assert chosen.learning_rate.model_dump()["initial"] == pytest.approx(lr)
    assert chosen.batch_size_search is None


@pytest.mark.parametrize(("rule", "lr"), [("linear", 0.025), ("sqrt", 0.05)])
def test_a_rate_for_another_batch_is_scaled_to_the_jobs(rule: str, lr: float) -> None:
    policy = {**STPT, "scaling": {"reference_batch_size": 256, "rule": rule}}
    scaled = settled(job(learning_rate=policy), 64).learning_rate.model_dump()
    assert scaled["initial"] == pytest.approx(lr)
    assert scaled["scaling"] is None


def test_a_chosen_batch_is_scaled_by_the_jobs_own_rule() -> None:
    policy = {**STPT, "scaling": {"reference_batch_size": 256, "rule": "sqrt"}}
    chosen = settled(job({"lr_rule": "none"}, learning_rate=policy), 1024)
    assert chosen.learning_rate.model_dump()["initial"] == pytest.approx(0.2)
    assert settled(chosen, 1024) == chosen


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"learning_rate": {"policy": "replay", "schedule": "schedule.jsonl"}},
            "batch_size_search: a replayed schedule",
        ),
        (
            {"parallel": {"micro_batches": 16}},
            r"parallel\.micro_batches: belongs to one global_batch_size",
        ),
    ],
)
def test_what_belongs_to_a_batch_size_excludes_a_search(changes: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        job(**changes)
    with pytest.raises(JobError, match=message):  # before anything starts
        find_batch_size(job(batch_size_search=None, **changes))


@pytest.mark.parametrize(
    ("search", "path"),
    [
        ({"strategy": "fastest"}, "batch_size_search.strategy"),
        ({"tolerance": 2}, "batch_size_search.tolerance"),
        ({"target_pct": 99}, "batch_size_search.target_pct"),
        ({"objective": "speed"}, "batch_size_search.objective"),
        ({"strategy": "epoch_time_minimize", "objective": "auto"}, "batch_size_search.objective"),
        ({"utilization_period_s": 0.01}, "batch_size_search.utilization_period_s"),
    ],
)
def test_wrong_settings_are_named(search: Any, path: str) -> None:
    with pytest.raises(JobError) as caught:
        job(search)
    assert path in str(caught.value)


def search_of(
    searched: Job, folder: Path, train_size: int = 10_000
) -> tuple[BatchSizeRecord, SizeBounds, str]:
    """Search on a machine that chooses the largest size; return what is shown, too."""
    lines: list[str] = []
    paths = RunPaths.create(str(folder), "run")
    terminal = SimpleNamespace(note=lines.append, phase=lambda _: None)
    workspace: Any = SimpleNamespace(paths=paths, terminal=terminal)
    seen: list[SizeBounds] = []

    def build(_: Any, bounds: SizeBounds) -> Any:
        seen.append(bounds)
        return None

    def run_probes(_: Any, _p: Any, _max: int, on_probe: Any) -> BatchSizeChoice:
        largest = seen[0].largest
        on_probe(BatchSizeProbeRecord.model_validate(probe_line(1, largest, check=True)))
        return BatchSizeChoice(largest, "the largest")

    placement, info = (
        Placement.from_job(searched),
        DataInfo(10, (1, 8, 8), train_size, train_size, 0, 100),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raytrain_opt.execution.batch_size.build_strategy", build)
        patch.setattr("raytrain_opt.execution.batch_size.run_probes", run_probes)
        size, again = (
            search_batch_size(searched, info, placement, workspace, nullcontext)  # type: ignore[arg-type]
            for _ in range(2)
        )
    record = read_record(str(paths.local), BatchSizeRecord)
    assert record is not None
    # A resumed run does not search again.
    assert (size, len(seen)) == (again, 1)
    assert size == record.global_batch_size
    return record, seen[0], "\n".join(lines)


def test_the_result_says_how_many_updates_are_left(tmp_path: Path) -> None:
    for changes, words in (
        ({"epochs": 6}, "156 an epoch, 936 in all -> 84 an epoch, 504 in all"),
        ({"epochs": 1}, "156 an epoch, 156 in all -> 156 an epoch, 156 in all"),
    ):
        text = search_of(job(**changes), tmp_path)[2]
        assert f"; updates: {words}; 1 probes" in text


@pytest.mark.parametrize(
    ("settings", "batch", "chosen", "warns"),
    [
        ({"lr_rule": "linear"}, 64, 500, False),
        ({"lr_rule": "linear"}, 32, 256, False),
        ({"lr_rule": "linear", "max_batch_size": 1000}, 32, 500, True),
        ({"lr_rule": "sqrt"}, 32, 500, False),
        ({"lr_rule": "none"}, 2, 500, False),
    ],
)
def test_the_rate_grows_beyond_what_its_rule_bears_only_for_a_size_of_the_job(
    settings: dict[str, Any], batch: int, chosen: int, warns: bool, tmp_path: Path
) -> None:
    searched = job(settings, epochs=50, global_batch_size=batch)
    record, _, text = search_of(searched, tmp_path)
    assert record.global_batch_size == chosen
    assert ("warning: learning_rate.initial grows 15.6-fold" in text) == warns


def test_a_time_limit_bounds_the_time_of_a_step(tmp_path: Path) -> None:
    searched = job(epochs=None, train_for="1000s", learning_rate={**STPT, "policy": "schedule"})
    _, bounds, _ = search_of(searched, tmp_path)
    assert bounds == SizeBounds(250, 5000, 32, max_step_s=1.6)


def test_a_slot_that_probes_has_the_resources_and_threads_of_a_worker(tmp_path: Path) -> None:
    paths = RunPaths.create(str(tmp_path), "run")

    def config(node: dict[str, float], **workers: Any) -> ResidentConfig:
        spread = job(workers={"count": 4, **workers}, storage_path=str(tmp_path))
        plan = plan_pools(spread, 0, [node] * 2)
        return prober_config(spread, plan, Placement.from_job(spread), paths)

    on_cpu = config({"CPU": 8.0}, resources={"CPU": 4})
    assert (on_cpu.plan.slots, on_cpu.plan.slots_per_node) == (1, 2)  # two workers on a node
    assert on_cpu.plan.slot_resources == {"CPU": 4}
    assert on_cpu.learner.worker_count == 4
    on_gpu = config({"CPU": 8.0, "GPU": 2.0}, resources={"GPU": 0.6})
    assert on_gpu.plan.slot_resources == {"GPU": 1.0}
