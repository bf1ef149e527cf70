"""What follows from a chosen batch size, and the cache of results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_opt import Job
from raytrain_opt.cluster.resources import plan_pools
from raytrain_opt.config.load import load_job, parse_job
from raytrain_opt.data.base import DataInfo
from raytrain_opt.errors import JobError, StorageError
from raytrain_opt.execution.batch_size import find_batch_size, search_batch_size
from raytrain_opt.execution.batch_size_cache import Cache, CachedSearch
from raytrain_opt.execution.preflight import Preflight, pool_request
from raytrain_opt.execution.rescale import apply_batch_size, resolve_lr_scaling
from raytrain_opt.paths import RunPaths
from raytrain_opt.pools.probes import ProbeConfig
from raytrain_opt.recording.records import BatchSizeProbeRecord
from raytrain_opt.results import GradientNorms, Probe
from raytrain_opt.search.batch_size.strategy import SizeBounds
from tests.support.synthetic_runs import batch_size, probe_line

LIMITS = SizeBounds(largest=700, epoch_samples=700)
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
    return parse_job({**values, **changes})


@pytest.mark.parametrize(("rule", "lr"), [("linear", 0.4), ("sqrt", 0.2), ("none", 0.1)])
@pytest.mark.parametrize("policy", [STPT, {"policy": "schedule", "initial": 0.1}])
def test_batch_and_rate_follow_the_choice(rule: str, lr: float, policy: Any) -> None:
    chosen = apply_batch_size(job({"lr_rule": rule}, learning_rate=policy), 128)
    assert chosen.global_batch_size == 256
    assert chosen.learning_rate.model_dump()["initial"] == pytest.approx(lr)
    assert chosen.batch_size_search is None


@pytest.mark.parametrize(("rule", "lr"), [("linear", 0.025), ("sqrt", 0.05)])
def test_a_rate_for_another_batch_is_scaled_to_the_jobs(rule: str, lr: float) -> None:
    policy = {**STPT, "scaling": {"reference_batch_size": 256, "rule": rule}}
    scaled = resolve_lr_scaling(job(learning_rate=policy)).learning_rate.model_dump()
    assert scaled["initial"] == pytest.approx(lr)
    assert scaled["scaling"] is None


def test_a_chosen_batch_is_scaled_by_the_jobs_own_rule() -> None:
    policy = {**STPT, "scaling": {"reference_batch_size": 256, "rule": "sqrt"}}
    chosen = apply_batch_size(job({"lr_rule": "none"}, learning_rate=policy), 512)
    assert chosen.learning_rate.model_dump()["initial"] == pytest.approx(0.2)
    assert resolve_lr_scaling(chosen) == chosen


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"learning_rate": {"policy": "replay", "schedule": "schedule.jsonl"}},
            "batch_size_search: a replayed schedule",
        ),
        (
            {"parallel": {"mode": "balanced", "micro_batches": 16}},
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
        (
            {"strategy": "epoch_time_minimize", "objective": "goodput"},
            "batch_size_search.objective",
        ),
        ({"utilization": {"period_s": 0.01}}, "batch_size_search.utilization.period_s"),
    ],
)
def test_wrong_settings_are_named(search: Any, path: str) -> None:
    with pytest.raises(JobError) as caught:
        job(search)
    assert path in str(caught.value)


def test_a_resumed_run_keeps_its_batch_size(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.batch_size.write_text(json.dumps(batch_size(batch_size_per_worker=48)))
    info: Any = SimpleNamespace(train_size=1000, search_size=900, validation_size=100)
    preflight = Preflight(None, info)
    session: Any = SimpleNamespace(job=job(), paths=paths, preflight=preflight)
    resolved = search_batch_size(session, fresh=True)
    assert resolved.job.global_batch_size == 96
    assert resolved.steps.first == 1000 // 96
    assert load_job(paths.job) == resolved.job


def test_a_job_without_a_search_is_resolved_already() -> None:
    plain = job().model_copy(update={"batch_size_search": None})
    session: Any = SimpleNamespace(job=plain, resolved=object())
    assert search_batch_size(session, fresh=False) is session.resolved


def cache(folder: Path, search: Any = None, largest: int = 700, **changes: Any) -> Cache:
    searched_job = job(search, storage_path=str(folder), **changes)
    return Cache.for_job(searched_job, SizeBounds(largest, largest), use_gpu=False)


@pytest.mark.parametrize(("size", "largest"), [(None, 125), (100, 100), (300, 125)])
def test_the_largest_size_leaves_room_for_the_batch_ramp(
    size: int | None, largest: int, tmp_path: Path
) -> None:
    ramped = job(
        {"max_batch_size": size},
        storage_path=str(tmp_path),
        batch_ramp={"steps": [{"epoch": 2, "factor": 4}]},
    )
    # What is searched has the place of its bounds.
    place = Cache.for_job(ramped, SizeBounds(largest, 500, 2), use_gpu=False)
    place.write(search_result(largest))
    info: Any = SimpleNamespace(train_size=1000, search_size=900, validation_size=100)
    session: Any = SimpleNamespace(
        job=ramped,
        paths=RunPaths.create(str(tmp_path), "run"),
        preflight=Preflight(None, info),
        plan=SimpleNamespace(use_gpu=False),
        terminal=SimpleNamespace(note=lambda _: None),
    )
    resolved = search_batch_size(session, fresh=False)
    assert resolved.job.batch_size_per_worker == largest
    assert resolved.steps(2) == 1


def test_a_probe_has_the_threads_of_a_worker_on_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Started(Exception):  # noqa: N818
        pass

    def start(config: ProbeConfig, *_: Any) -> None:
        assert config.threads == 4
        raise Started

    monkeypatch.setattr("raytrain_opt.pools.probes.ProbeProcess", start)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr("ray.put", lambda _: None)
    spread = job(workers={"count": 4, "resources": {"CPU": 4}}, storage_path=str(tmp_path))
    session: Any = SimpleNamespace(
        job=spread,
        owns_ray=True,
        paths=RunPaths.create(str(tmp_path), "run"),
        preflight=Preflight(None, DataInfo(10, (1, 8, 8), 1000, 900, 100, 100)),
        plan=plan_pools(pool_request(spread, candidates=0), [{"CPU": 8.0}] * 2),
        terminal=SimpleNamespace(note=lambda _: None, phase=lambda _: None),
    )
    with pytest.raises(Started):
        search_batch_size(session, fresh=True)


def search_result(batch_size: int, probes: Sequence[BatchSizeProbeRecord] = ()) -> CachedSearch:
    return CachedSearch(
        batch_size=batch_size, samples_per_s=1234.5, reason="the knee", probes=list(probes)
    )


def test_a_result_is_cached_and_read_again(tmp_path: Path) -> None:
    probe = BatchSizeProbeRecord.model_validate(probe_line(1, 96))
    cached = search_result(96, [probe])
    assert cache(tmp_path).read() is None
    cache(tmp_path).write(cached)
    assert cache(tmp_path).read() == cached
    assert Path(cache(tmp_path).shown).is_file()


@pytest.mark.parametrize("content", ["", "[]", '{"batch_size": 3}', "{}"])
def test_a_damaged_result_is_named(tmp_path: Path, content: str) -> None:
    cached = Path(cache(tmp_path).shown)
    cached.parent.mkdir()
    cached.write_text(content)
    with pytest.raises(JobError, match=rf"{cached.name} is damaged.*--fresh"):
        cache(tmp_path).read()


def test_a_file_uri_caches_results_too(tmp_path: Path) -> None:
    cached = search_result(8)
    searched_job = job(storage_path=f"file://{tmp_path}")
    Cache.for_job(searched_job, LIMITS, use_gpu=False).write(cached)
    assert Cache.for_job(searched_job, LIMITS, use_gpu=False).read() == cached


def test_the_key_holds_what_affects_the_speed(tmp_path: Path) -> None:
    same = [cache(tmp_path), cache(tmp_path, epochs=9), cache(tmp_path, seed=3, name="other")]
    assert len({cached.name for cached in same}) == 1
    other = [
        cache(tmp_path, model="resnet8"),
        cache(tmp_path, data="mnist"),
        cache(tmp_path, precision="bf16"),
        cache(tmp_path, task="my_tasks:Denoise"),
        cache(tmp_path, average={"kind": "ema"}),
        cache(tmp_path, batch_norm={"sync": True}),
        cache(tmp_path, evaluate={"batch_size_per_worker": 4096}),
        cache(tmp_path, {"tolerance": 0.1}),
        cache(tmp_path, {"objective": "goodput"}),
        cache(tmp_path, workers={"count": 1}),
        cache(tmp_path, largest=50),
    ]
    assert len({cached.name for cached in [*same, *other]}) == 1 + len(other)


def test_storage_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        cache(tmp_path / "file").write(search_result(1))


@pytest.mark.parametrize("measured", [True, False])
def test_a_probes_line_has_the_noise_scale_for_its_norms(measured: bool) -> None:
    norms = GradientNorms(8, 16, ((1 + 100 / 8, 1 + 100 / 16),) * 5) if measured else None
    probe = Probe(8, "ok", 1.0, 0.1, norms=norms)
    record = BatchSizeProbeRecord.from_probe(1, probe, "first", check=False, pid=None)
    line = json.loads(record.model_dump_json())
    assert "norms" not in line
    if measured:
        assert line["noise_scale"]["value"] == pytest.approx(100)
        assert line["noise_scale"]["updates"] == 5
    else:
        assert line["noise_scale"] is None
