"""Gradient buckets on two and on four processes: the same results, whatever the plan.

All cases run once for each number of processes, in `bucket_rank.py`; the tests read its
results.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.process_group import run_ranks

RANKS = "tests.multiprocess.bucket_rank"
MIB = 2**20
LAYER = (512 * 512 + 512) * 4
STEPS, MICRO_BATCHES, LR = 20, 2, 2.0**-6
PLANS = ["default", "growing", "auto"]
# Warm-up and timed steps of each plan that `auto` times.
TIMED = 2
STEPS_PER_PLAN = 2 + TIMED

RankResults = dict[str, Any]


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[RankResults]:
    return run_ranks(RANKS, request.param, tmp_path_factory.mktemp("ranks") / "run")


def assert_bit_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def assert_near(actual: RankResults, expected: RankResults, error: float) -> None:
    """Compare the last gradients of two trainings; `error` is relative to the norm."""
    for gradient, reference in zip(actual["gradients"], expected["gradients"], strict=True):
        assert (gradient - reference).norm() <= error * reference.norm()


def summed_factors(rank: int, steps: range) -> int:
    """Sum `bucket_rank.factor` over all micro-batches of one rank."""
    return sum(
        (3 * step + 5 * rank + 2 * micro_batch) % 8
        for step in steps
        for micro_batch in range(MICRO_BATCHES)
    )


@pytest.mark.parametrize("plan", PLANS)
def test_every_gradient_counts_once_even_after_wrapping_again(
    ranks: list[RankResults], plan: str
) -> None:
    """Compared with sums of integers, which are exact in any order."""
    total = sum(summed_factors(rank, range(STEPS)) for rank in range(len(ranks)))
    last = sum(summed_factors(rank, range(STEPS - 1, STEPS)) for rank in range(len(ranks)))
    for results in ranks:
        state = results["exact"][plan]["state"]
        parameters = [value for name, value in state.items() if "pattern" not in name]
        for index, weights in enumerate(parameters):
            pattern = state[f"pattern{index}"]
            assert torch.equal(weights, -LR * total / len(ranks) * pattern)
            gradient = results["exact"][plan]["gradients"][index]
            assert torch.equal(gradient, last / len(ranks) * pattern)


@pytest.mark.parametrize("plan", ["growing", "auto"])
@pytest.mark.parametrize("ranks", [2], ids="{} ranks".format, indirect=True)
def test_two_processes_train_bit_identically_to_the_default_buckets(
    ranks: list[RankResults], plan: str
) -> None:
    for results in ranks:
        real = results["real"]
        assert all(gradient.norm() > 0.01 for gradient in real[plan]["gradients"])
        assert_bit_equal(real[plan]["state"], real["default"]["state"])


def test_gradients_equal_those_of_the_default_buckets_up_to_rounding(
    ranks: list[RankResults],
) -> None:
    """The order of additions in gloo depends on the position of a value in a message."""
    error = 0 if len(ranks) == 2 else 1e-6
    for results in ranks:
        assert_near(
            results["constant_weights"]["growing none"],
            results["constant_weights"]["default none"],
            error,
        )


@pytest.mark.parametrize("plan", PLANS)
def test_weights_are_equal_and_running_statistics_are_per_process(
    ranks: list[RankResults], plan: str
) -> None:
    first, *others = (results["real"][plan]["state"] for results in ranks)
    for name, value in first.items():
        for other in others:
            if "running" in name:
                assert not torch.equal(value, other[name])
            else:
                assert torch.equal(value, other[name])


def test_growing_buckets_are_sent_as_planned_once_per_update(ranks: list[RankResults]) -> None:
    for results in ranks:
        sent, report = (
            results["exact"]["growing"]["messages"],
            results["exact"]["growing"]["report"],
        )
        # One default bucket, then new ones before DDP knows the order, then the planned ones.
        assert sent[0] == [5 * LAYER]
        assert sum(sent[1]) == 5 * LAYER
        assert sent[2:] == [[1 * LAYER, 2 * LAYER, 2 * LAYER]] * (STEPS - 2)
        assert report["buckets_mib"] == [round(n * LAYER / MIB, 3) for n in (1, 2, 2)]


def test_auto_times_each_plan_and_keeps_the_fastest(ranks: list[RankResults]) -> None:
    expected = {
        "default": [1, 4],
        "growing": [1, 2, 2],
        "growing_large": [4, 1],
        "single": [5],
    }
    for results in ranks:
        sent, report = results["exact"]["auto"]["messages"], results["exact"]["auto"]["report"]
        assert [trial["buckets"] for trial in report["tried"]] == list(expected)
        for index, counts in enumerate(expected.values()):
            counted = sent[1 + STEPS_PER_PLAN * index :][2:STEPS_PER_PLAN]
            assert [len(sizes) for sizes in counted] == [len(counts)] * TIMED
            if index > 0:
                assert counted == [[n * LAYER for n in counts]] * TIMED
        assert [len(sizes) for sizes in sent[-2:]] == [len(report["buckets_mib"])] * 2


def test_all_ranks_choose_from_the_same_timings(ranks: list[RankResults]) -> None:
    for model in ("exact", "real"):
        reports = [results[model]["auto"]["report"] for results in ranks]
        assert all(report["tried"] == reports[0]["tried"] for report in reports)
        assert {report["buckets"] for report in reports} == {reports[0]["buckets"]}
        medians = {trial["buckets"]: median(trial["step_s"]) for trial in reports[0]["tried"]}
        assert len(medians) == 4
        assert reports[0]["buckets"] == min(medians, key=lambda name: medians[name])
        assert all(0 < step_s < 60 for step_s in medians.values())
        assert all(len(trial["step_s"]) == TIMED for trial in reports[0]["tried"])


@pytest.mark.parametrize("plan", PLANS)
def test_replaced_ddp_instances_are_freed(ranks: list[RankResults], plan: str) -> None:
    for results in ranks:
        for model in ("exact", "real"):
            assert results[model][plan]["leaked"] == 0
            wrapped = len(results[model][plan]["report"]["wrap_s"])
            assert wrapped in {"default": [0], "growing": [1], "auto": [3, 4]}[plan]


@pytest.mark.parametrize(
    ("form", "dtype", "error"), [("bf16", torch.bfloat16, 2**-7), ("fp16", torch.float16, 2**-10)]
)
def test_compressed_gradients_are_close_and_were_sent_compressed(
    ranks: list[RankResults], form: str, dtype: torch.dtype, error: float
) -> None:
    for results in ranks:
        compressed = results["constant_weights"][f"growing {form}"]
        assert compressed["report"]["compression"] == form
        assert_near(compressed, results["constant_weights"]["growing none"], error)
        for gradient in compressed["gradients"]:
            assert torch.equal(gradient, gradient.to(dtype).float())


def test_an_early_connection_does_not_block_its_process(ranks: list[RankResults]) -> None:
    assert all(0 < results["connected_s"] < 60 for results in ranks)
