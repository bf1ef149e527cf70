from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytrain_opt import Job
from raytrain_opt.data.base import DataInfo
from raytrain_opt.errors import ResourcesError
from raytrain_opt.optim.epoch_steps import epoch_steps
from raytrain_opt.planning.cluster import ClusterSection
from raytrain_opt.planning.prediction import Planner, search_rounds
from raytrain_opt.planning.terms import MeasuredStep, Terms
from raytrain_opt.search.factory import build_policy
from tests.support.small_jobs import small_job

INFO = DataInfo(10, (3, 8, 8), 6400, 6400, 0, 640)
FIXED = {"policy": "schedule", "shape": "constant", "initial": 0.1}


def planner(terms: Terms, job: Job | None = None, size: float = 0, **cluster: Any) -> Planner:
    section = ClusterSection(**{"nodes": 4, "devices": 8, "kind": "H100", **cluster})
    return Planner(job or small_job(Path(), learning_rate=FIXED), INFO, section, terms, size)


def test_a_step_is_the_time_of_a_worker_s_part_of_the_batch() -> None:
    plan = planner(Terms(0.5, 0.01, 0, 0))
    assert plan.step_s(1, 64)[0] == pytest.approx(0.5 + 0.64)
    assert plan.step_s(8, 64)[0] == pytest.approx(0.5 + 0.08, rel=1e-3)


def test_the_backward_pass_hides_the_exchange_but_for_its_last_message() -> None:
    links = {"link_gb_s": 1, "link_latency_us": 1e-6}
    size = 2**20 + 3 * 25 * 2**20  # four messages
    slow, fast = (planner(Terms(0, c, 0, 0), size=size, **links) for c in (1.0, 0.001))
    exchange_s = 2 * size * 7 / 8 / 1e9
    step_s, exchanged_s, hidden_s = slow.step_s(8, 64)
    assert exchanged_s == pytest.approx(exchange_s, rel=1e-3)
    assert hidden_s == pytest.approx(exchange_s * 3 / 4, rel=1e-3)
    assert step_s == pytest.approx(8 + exchange_s / 4, rel=1e-3)
    # A short backward pass hides only as much as it takes.
    assert fast.step_s(8, 64)[2] == pytest.approx(0.008 * 2 / 3)


def test_processes_share_the_cores_of_a_cpu_and_hide_nothing() -> None:
    job = small_job(Path(), learning_rate=FIXED, workers={"count": 2, "threads": 1})
    plan = planner(Terms(0, 0.01, 0, 0), job, nodes=1, devices=2, kind="CPU")
    times = [plan.step_s(workers, 64)[0] for workers in (1, 2, 4)]
    assert times == pytest.approx([0.64, 0.32, 0.32], rel=0.01)


def test_a_worker_with_fewer_threads_than_the_measured_one_is_slower() -> None:
    job = small_job(Path(), learning_rate=FIXED, workers={"count": 1})
    plan = planner(Terms(0, 0.01, 0, 0, threads=8), job, nodes=1, devices=8, kind="CPU")
    # Two workers have four threads each: together as fast as one with eight.
    assert plan.step_s(2, 64)[0] == pytest.approx(plan.step_s(1, 64)[0], rel=0.01)


def test_a_measured_step_of_several_workers_tells_how_fast_busy_cores_compute() -> None:
    job = small_job(Path(), learning_rate=FIXED, workers={"count": 2, "threads": 1})
    plan = planner(Terms(0, 0.01, 0, 0), job, nodes=1, devices=3, kind="CPU")
    # 0.2 s instead of 0.16 s with one other of two cores busy: half of what both would cost.
    busy = plan.calibrated([MeasuredStep(2, 32, 0.2)])
    assert busy.terms.busy == pytest.approx(1.5, rel=0.01)
    slowdown = [busy.step_s(n, 96)[0] / plan.step_s(n, 96)[0] for n in (1, 2, 3, 6)]
    assert slowdown == pytest.approx([1, 1.25, 1.5, 1.5], rel=0.01)
    # One worker says nothing of busy cores, and GPUs share nothing.
    assert plan.calibrated([MeasuredStep(1, 32, 9.0)]) == plan
    on_gpus = planner(Terms(0, 0.01, 0, 0))
    assert on_gpus.calibrated([MeasuredStep(2, 32, 9.0)]) == on_gpus


def test_a_training_waits_for_checkpoints_that_outlast_an_epoch() -> None:
    slow, fast = (planner(Terms(0.01, 0, 0, 0, checkpoint_s=s)) for s in (5.0, 0.5))
    # Three epochs of 1 s: two wait for the checkpoint before them, and the end for the last.
    assert slow.predict(1, 64).training_s == pytest.approx(1 + 5 + 5 + 5)
    assert fast.predict(1, 64).training_s == pytest.approx(3 + 0.5)
    rare = small_job(Path(), learning_rate=FIXED, checkpoint={"every_epochs": 3})
    assert replace(slow, job=rare).predict(1, 64).training_s == pytest.approx(3 + 5)


def test_loaders_limit_a_step() -> None:
    plan = planner(Terms(0, 1e-6, 0, 0), loader_samples_per_s=100)
    assert plan.step_s(8, 64)[0] == pytest.approx(0.64)
    assert plan.step_s(32, 64)[0] == pytest.approx(0.16)


def test_a_training_adds_steps_evaluations_and_what_epochs_take_besides() -> None:
    plan = planner(Terms(0.01, 0.001, 100, 7, epoch_s=2.0), price_per_node_hour=10)
    predicted = plan.predict(1, 64)
    step_s, evaluate_s = 0.01 + 0.064, 640 * 0.001 / 3
    assert predicted.epoch_s == pytest.approx(100 * step_s + evaluate_s + 2)
    assert predicted.training_s == pytest.approx(3 * predicted.epoch_s)
    assert (predicted.search_s, predicted.memory_bytes) == (0, 100 + 64 * 7)
    assert predicted.cost == pytest.approx(10 * predicted.total_s / 3600)


def test_a_batch_that_grows_takes_longer_steps_and_fewer() -> None:
    ramp = {"steps": [{"epoch": 3, "factor": 4}]}
    job = small_job(Path(), learning_rate=FIXED, batch_ramp=ramp)
    constant, growing = (planner(Terms(0.01, 0, 0, 0), j) for j in (None, job))
    assert constant.predict(1, 64).training_s == pytest.approx(300 * 0.01)
    assert growing.predict(1, 64).training_s == pytest.approx((200 + 25) * 0.01)


def searching(**changes: Any) -> Job:
    policy = {"policy": "stpt_horizon", "search_on": "workers"}
    values = {"learning_rate": policy, "optimizer": "SGD", "epochs": 30, **changes}
    return small_job(Path(), **values)


def test_a_search_on_workers_takes_the_same_part_of_the_time_as_of_the_samples() -> None:
    job = searching(global_batch_size=128)
    policy = build_policy(job, epoch_steps(50_000, 128, search_size=45_000))
    rounds = search_rounds(policy, 30)
    samples = sum(len(r.candidates) * r.pretrain_steps for r in rounds) / (30 * 390)
    # Three coarse and three fine candidates; extensions may use the rest of an eighth.
    assert 0.04 < samples < 0.125
    sizes = DataInfo(10, (3, 8, 8), 50_000, 45_000, 5000, 0)
    for workers in (1, 8):
        plan = replace(planner(Terms(0, 0.001, 0, 0), job), info=sizes)
        predicted = plan.predict(workers, 128)
        assert predicted.search_on == "on the workers"
        scoring = predicted.search_s / predicted.training_s / samples
        assert 1 <= scoring < 1.6


def test_a_small_training_has_the_search_that_decides() -> None:
    plan = planner(Terms(0, 0.001, 0, 0), searching(epochs=4))  # 400 updates
    small = replace(plan, sample_flops=1e6).predict(1, 64)
    assert small.search_s > 2.5 * plan.predict(1, 64).search_s
    assert small.training_s == plan.predict(1, 64).training_s


def test_slots_take_the_time_of_the_complete_batch() -> None:
    slots = {"policy": "stpt_horizon", "search_on": "slots"}
    plan = planner(Terms(0, 0.001, 0, 0), searching(learning_rate=slots, slots={}), nodes=1)
    on_slots = plan.predict(8, 64)
    on_workers = replace(plan, job=searching()).predict(8, 64)
    assert on_slots.search_on == "on 3 slots"
    # Three candidates side by side, each eight times as long: 8 / 3.
    assert on_slots.search_s == pytest.approx(on_workers.search_s * 8 / 3, rel=0.05)


def test_published_rounds_keep_the_winner_s_steps() -> None:
    job = small_job(Path(), slots={"count": 2})
    plan = planner(Terms(0, 0.001, 0, 0), job)
    predicted = plan.predict(1, 64)
    # Two candidates of five steps side by side take as long as the five steps that are kept.
    assert predicted.search_s == pytest.approx(0, abs=1e-9)


def test_doublings_leave_out_what_does_not_fit() -> None:
    plan = planner(Terms(0.01, 0.001, 0, 2**30), nodes=3)
    assert [p.workers for p in plan.doublings()] == [1, 2, 4, 8, 16]  # 24 does not divide 64
    tight = planner(Terms(0.01, 0.001, 60 * 2**30, 2**30), nodes=3)
    assert [p.workers for p in tight.doublings()] == [4, 8, 16]


def test_workers_that_do_not_fit_are_refused_also_without_candidates() -> None:
    with pytest.raises(ResourcesError, match="64 workers of .* do not fit"):
        planner(Terms(0.01, 0.001, 0, 0)).predict(64, 64)  # on 32 GPUs


def test_only_a_known_noise_scale_makes_other_batches_choices() -> None:
    plan = planner(Terms(0.01, 0.001, 0, 0))
    assert {p.global_batch_size for p in plan.choices()} == {64}
    noisy = planner(Terms(0.01, 0.001, 0, 0, noise_scale=64))
    assert {p.global_batch_size for p in noisy.choices()} == {2**k for k in range(3, 13)}
    # At the noise scale, a doubled batch needs half as many samples more.
    assert noisy.progress(128) == pytest.approx(1.5)
    # Without noise, it needs twice as many.
    assert planner(Terms(0.01, 0.001, 0, 0, noise_scale=0.0)).progress(128) == 2.0
