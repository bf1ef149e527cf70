"""What follows from a chosen batch size, and where answers are kept."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_opt import Job
from raytrain_opt.batch_size import probe_line, with_batch_size, with_choice, with_scaled_lr
from raytrain_opt.batch_size_cache import Answer, Cache
from raytrain_opt.config.load import parse_job
from raytrain_opt.errors import CommitError, JobError
from raytrain_opt.paths import RunPaths
from raytrain_opt.pools.probes import ProbeRecord
from raytrain_opt.search.batch_size import Limits
from raytrain_opt.train.probe_result import Probe
from raytrain_opt.train.totals import GradientNorms

LIMITS = Limits(largest=700, epoch_samples=700)
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
    chosen = with_choice(job({"lr_rule": rule}, learning_rate=policy), 128)
    assert chosen.global_batch_size == 256
    assert chosen.learning_rate.model_dump()["initial"] == pytest.approx(lr)
    assert chosen.batch_size_search is None


@pytest.mark.parametrize(("rule", "lr"), [("linear", 0.025), ("sqrt", 0.05)])
def test_a_rate_for_another_batch_is_scaled_to_the_jobs(rule: str, lr: float) -> None:
    policy = {**STPT, "scaling": {"reference_batch_size": 256, "rule": rule}}
    scaled = with_scaled_lr(job(learning_rate=policy)).learning_rate.model_dump()
    assert scaled["initial"] == pytest.approx(lr)
    assert scaled["scaling"] is None


def test_a_chosen_batch_is_scaled_by_the_jobs_own_rule() -> None:
    policy = {**STPT, "scaling": {"reference_batch_size": 256, "rule": "sqrt"}}
    chosen = with_choice(job({"lr_rule": "none"}, learning_rate=policy), 512)
    assert chosen.learning_rate.model_dump()["initial"] == pytest.approx(0.2)
    assert with_scaled_lr(chosen) == chosen


def test_a_replayed_schedule_keeps_its_batch_size() -> None:
    with pytest.raises(JobError, match="batch_size_search: a replayed schedule"):
        job(learning_rate={"policy": "replay", "schedule": "schedule.json"})


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
    paths.batch_size.write_text('{"batch_size_per_worker": 48}')
    session: Any = SimpleNamespace(paths=paths)
    assert with_batch_size(job(), session, fresh=True).global_batch_size == 96


def test_a_job_without_a_search_is_left_alone() -> None:
    plain = job().model_copy(update={"batch_size_search": None})
    nothing: Any = None
    assert with_batch_size(plain, nothing, fresh=False) is plain


def cache(folder: Path, search: Any = None, largest: int = 700, **changes: Any) -> Cache:
    made = job(search, storage_path=str(folder), **changes)
    return Cache.of(made, Limits(largest, largest), use_gpu=False)


def test_an_answer_is_kept_and_read_again(tmp_path: Path) -> None:
    kept = Answer(96, 1234.5, "the knee", [{"probe": 1, "batch_size": 96}])
    assert cache(tmp_path).read() is None
    cache(tmp_path).write(kept)
    assert cache(tmp_path).read() == kept
    assert Path(cache(tmp_path).shown).is_file()


@pytest.mark.parametrize("content", ["", "[]", '{"batch_size": 3}', "{}"])
def test_a_damaged_answer_is_named(tmp_path: Path, content: str) -> None:
    kept = Path(cache(tmp_path).shown)
    kept.parent.mkdir()
    kept.write_text(content)
    with pytest.raises(JobError, match=rf"{kept.name} is damaged.*--fresh"):
        cache(tmp_path).read()


def test_a_file_uri_keeps_answers_too(tmp_path: Path) -> None:
    kept = Answer(8, 1.0, "", [])
    made = job(storage_path=f"file://{tmp_path}")
    Cache.of(made, LIMITS, use_gpu=False).write(kept)
    assert Cache.of(made, LIMITS, use_gpu=False).read() == kept


def test_what_decides_the_speed_is_the_key(tmp_path: Path) -> None:
    same = [cache(tmp_path), cache(tmp_path, epochs=9), cache(tmp_path, seed=3, name="other")]
    assert len({one.key for one in same}) == 1
    other = [
        cache(tmp_path, model="resnet8"),
        cache(tmp_path, data="mnist"),
        cache(tmp_path, precision="bf16"),
        cache(tmp_path, {"tolerance": 0.1}),
        cache(tmp_path, {"objective": "goodput"}),
        cache(tmp_path, workers={"count": 1}),
        cache(tmp_path, largest=50),
    ]
    assert len({one.key for one in [*same, *other]}) == 1 + len(other)


def test_storage_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CommitError, match="file"):
        cache(tmp_path / "file").write(Answer(1, 1.0, "", []))


@pytest.mark.parametrize("measured", [True, False])
def test_a_probes_line_has_the_noise_scale_for_its_norms(measured: bool) -> None:
    norms = GradientNorms(8, 16, ((1 + 100 / 8, 1 + 100 / 16),) * 5) if measured else None
    line = probe_line(1, ProbeRecord(Probe(8, "ok", 1.0, 0.1, norms=norms), "first", None))
    assert "norms" not in line
    assert json.loads(json.dumps(line, allow_nan=False)) == line
    if measured:
        assert line["noise_scale"]["value"] == pytest.approx(100)
        assert line["noise_scale"]["updates"] == 5
    else:
        assert line["noise_scale"] is None
