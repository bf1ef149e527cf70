"""Gradient buckets on two and on four processes: the same results, whatever the plan.

All cases run once for each number of processes, in `bucket_rank.py`; the tests read what it
left.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

RANK_PY = Path(__file__).with_name("bucket_rank.py")
MIB = 2**20
LAYER = (512 * 512 + 512) * 4
STEPS, SHARES, LR = 20, 2, 2.0**-6
PLANS = ["default", "growing", "auto"]
# Uncounted and counted steps of each plan that `auto` tries.
COUNTED = 2
TRIED_STEPS = 2 + COUNTED

Found = dict[str, Any]


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return run_ranks(RANK_PY, request.param, tmp_path_factory.mktemp("ranks") / "run")


def assert_bit_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def assert_near(found: Found, expected: Found, error: float) -> None:
    """The last gradients of two trainings; `error` is relative to each one's norm."""
    for one, other in zip(found["gradients"], expected["gradients"], strict=True):
        assert (one - other).norm() <= error * other.norm()


def summed_factors(rank: int, steps: range) -> int:
    """Of all shares of one rank: see `bucket_rank.factor`."""
    return sum((3 * step + 5 * rank + 2 * share) % 8 for step in steps for share in range(SHARES))


@pytest.mark.parametrize("plan", PLANS)
def test_every_gradient_counts_once_also_after_wrapping_anew(
    ranks: list[Found], plan: str
) -> None:
    """Against sums by hand, which are exact in any order."""
    whole = sum(summed_factors(rank, range(STEPS)) for rank in range(len(ranks)))
    last = sum(summed_factors(rank, range(STEPS - 1, STEPS)) for rank in range(len(ranks)))
    for found in ranks:
        state = found["exact"][plan]["state"]
        parameters = [value for name, value in state.items() if "pattern" not in name]
        for index, weights in enumerate(parameters):
            pattern = state[f"pattern{index}"]
            assert torch.equal(weights, -LR * whole / len(ranks) * pattern)
            gradient = found["exact"][plan]["gradients"][index]
            assert torch.equal(gradient, last / len(ranks) * pattern)


@pytest.mark.parametrize("plan", ["growing", "auto"])
@pytest.mark.parametrize("ranks", [2], ids="{} ranks".format, indirect=True)
def test_two_processes_train_to_the_bit_as_with_torchs_buckets(
    ranks: list[Found], plan: str
) -> None:
    for found in ranks:
        real = found["real"]
        assert all(gradient.norm() > 0.01 for gradient in real[plan]["gradients"])
        assert_bit_equal(real[plan]["state"], real["default"]["state"])


def test_gradients_are_those_of_torchs_buckets_up_to_the_order_of_additions(
    ranks: list[Found],
) -> None:
    """Of more than two summands: gloo's order depends on where in a message a value lies."""
    error = 0 if len(ranks) == 2 else 1e-6
    for found in ranks:
        assert_near(found["still"]["growing none"], found["still"]["default none"], error)


@pytest.mark.parametrize("plan", PLANS)
def test_weights_are_common_and_running_statistics_each_ones_own(
    ranks: list[Found], plan: str
) -> None:
    first, *others = (found["real"][plan]["state"] for found in ranks)
    for name, value in first.items():
        for other in others:
            if "running" in name:
                assert not torch.equal(value, other[name])
            else:
                assert torch.equal(value, other[name])


def test_growing_buckets_are_sent_as_planned_once_for_all_shares(ranks: list[Found]) -> None:
    for found in ranks:
        sent, report = found["exact"]["growing"]["messages"], found["exact"]["growing"]["report"]
        # Torch's single one, then new buckets before DDP knows the order, then the planned.
        assert sent[0] == [5 * LAYER]
        assert sum(sent[1]) == 5 * LAYER
        assert sent[2:] == [[1 * LAYER, 2 * LAYER, 2 * LAYER]] * (STEPS - 2)
        assert report["buckets_mib"] == [round(n * LAYER / MIB, 3) for n in (1, 2, 2)]


def test_auto_trains_with_each_plan_and_keeps_the_fastest(ranks: list[Found]) -> None:
    expected = {
        "default": [1, 4],
        "growing": [1, 2, 2],
        "growing_large": [4, 1],
        "single": [5],
    }
    for found in ranks:
        sent, report = found["exact"]["auto"]["messages"], found["exact"]["auto"]["report"]
        assert [each["buckets"] for each in report["tried"]] == list(expected)
        for index, counts in enumerate(expected.values()):
            counted = sent[1 + TRIED_STEPS * index :][2:TRIED_STEPS]
            assert [len(sizes) for sizes in counted] == [len(counts)] * COUNTED
            if index > 0:
                assert counted == [[n * LAYER for n in counts]] * COUNTED
        assert [len(sizes) for sizes in sent[-2:]] == [len(report["buckets_mib"])] * 2


def test_all_ranks_choose_by_the_same_figures(ranks: list[Found]) -> None:
    for model in ("exact", "real"):
        reports = [found[model]["auto"]["report"] for found in ranks]
        assert all(report["tried"] == reports[0]["tried"] for report in reports)
        assert {report["buckets"] for report in reports} == {reports[0]["buckets"]}
        medians = {each["buckets"]: median(each["step_s"]) for each in reports[0]["tried"]}
        assert len(medians) == 4
        assert reports[0]["buckets"] == min(medians, key=lambda name: medians[name])
        assert all(0 < each < 60 for each in medians.values())
        assert all(len(each["step_s"]) == COUNTED for each in reports[0]["tried"])


@pytest.mark.parametrize("plan", PLANS)
def test_no_old_wrapping_stays_alive(ranks: list[Found], plan: str) -> None:
    for found in ranks:
        for model in ("exact", "real"):
            assert found[model][plan]["leaked"] == 0
            wrapped = len(found[model][plan]["report"]["wrap_s"])
            assert wrapped in {"default": [0], "growing": [1], "auto": [3, 4]}[plan]


@pytest.mark.parametrize(
    ("form", "dtype", "error"), [("bf16", torch.bfloat16, 2**-7), ("fp16", torch.float16, 2**-10)]
)
def test_compressed_gradients_are_near_and_have_travelled_in_their_form(
    ranks: list[Found], form: str, dtype: torch.dtype, error: float
) -> None:
    for found in ranks:
        compressed = found["still"][f"growing {form}"]
        assert compressed["report"]["compression"] == form
        assert_near(compressed, found["still"]["growing none"], error)
        for gradient in compressed["gradients"]:
            assert torch.equal(gradient, gradient.to(dtype).float())


def test_an_early_connection_leaves_its_process_to_other_things(ranks: list[Found]) -> None:
    assert all(0 < found["connected_s"] < 60 for found in ranks)
