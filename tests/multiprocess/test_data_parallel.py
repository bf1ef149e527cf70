"""Two processes with DDP over gloo, against one process that computes both shares.

All phases run once, in `rank.py`; the tests read what it left.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

RANK_PY = Path(__file__).with_name("rank.py")
MODELS = ["plain", "small_cnn"]

Found = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return run_ranks(RANK_PY, 2, tmp_path_factory.mktemp("two") / "run")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Found:
    [found] = run_ranks(RANK_PY, 1, tmp_path_factory.mktemp("one") / "run")
    return found


@pytest.mark.parametrize("model", MODELS)
def test_both_ranks_hold_the_same_state_after_training(ranks: list[Found], model: str) -> None:
    first, second = (found[model] for found in ranks)
    assert first["middle"] == second["middle"]
    assert first["reached"] == second["reached"]
    assert first["middle"] != first["reached"][0]


@pytest.mark.parametrize("model", MODELS)
def test_a_phase_repeats_from_a_loaded_state(ranks: list[Found], model: str) -> None:
    """DDP goes on with the parameters into which a state was copied."""
    once, again = ranks[0][model]["reached"]
    assert once == again


def test_one_process_with_all_shares_gives_the_same_weights(
    ranks: list[Found], alone: Found
) -> None:
    for name, expected in alone["plain"]["weights"].items():
        for found in ranks:
            torch.testing.assert_close(
                found["plain"]["weights"][name], expected, rtol=0, atol=1e-5
            )


def test_fewer_workers_than_planned_compute_the_same_update(
    ranks: list[Found], alone: Found
) -> None:
    assert [found["three_shares"]["samples"] for found in ranks] == [6 * 11, 6 * 22]
    for name, expected in alone["three_shares"]["weights"].items():
        for found in ranks:
            torch.testing.assert_close(
                found["three_shares"]["weights"][name], expected, rtol=0, atol=1e-5
            )


@pytest.mark.parametrize("model", MODELS)
def test_the_ranks_share_the_batch(ranks: list[Found], alone: Found, model: str) -> None:
    totals = [found[model]["totals"] for found in ranks]
    assert [each["samples"] for each in totals] == [6 * 16, 6 * 16]
    assert alone[model]["totals"]["samples"] == 6 * 32
    assert totals[0]["loss_sum"] != totals[1]["loss_sum"]


def test_the_ranks_losses_add_up_to_those_of_one_process(ranks: list[Found], alone: Found) -> None:
    together = sum(found["plain"]["totals"]["loss_sum"] for found in ranks)
    assert together == pytest.approx(alone["plain"]["totals"]["loss_sum"], rel=1e-4)


def test_running_statistics_are_pooled_over_the_ranks(ranks: list[Found]) -> None:
    """What they are exactly: `test_batchnorm`. These averages stray by chance by 1e-3 at most."""
    own = [found["small_cnn"]["own_buffers"] for found in ranks]
    statistics = [name for name, value in own[0].items() if value.is_floating_point()]
    assert len(statistics) == 6
    for name in statistics:
        assert not torch.equal(own[0][name], own[1][name])
        expected = (own[0][name] + own[1][name]) / 2
        rtol = 1e-6
        if name.endswith("running_var"):
            mean_name = name.replace("running_var", "running_mean")
            expected += ((own[0][mean_name] - own[1][mean_name]) / 2).square()
            rtol = 1e-3
        for found in ranks:
            averaged = found["small_cnn"]["averaged_buffers"][name]
            torch.testing.assert_close(averaged, expected, rtol=rtol, atol=1e-7)


def test_counters_stay_exact(ranks: list[Found]) -> None:
    for found in ranks:
        averaged = found["small_cnn"]["averaged_buffers"]
        counts = [v for v in averaged.values() if not v.is_floating_point()]
        assert [int(count) for count in counts] == [2**24 + 1 + 6] * 3


def test_sums_are_over_all_ranks_in_double_precision(ranks: list[Found]) -> None:
    assert [found["reduced"] for found in ranks] == [[3.0, 2e15 + 1]] * 2


@pytest.mark.parametrize("model", MODELS)
def test_every_test_sample_counts_once(ranks: list[Found], alone: Found, model: str) -> None:
    parts = [found[model]["evaluated"]["part"] for found in ranks]
    sums = [found[model]["evaluated"]["sum"] for found in ranks]
    assert [part[0] for part in parts] == [19, 18]
    assert sums[0] == sums[1] == pytest.approx([a + b for a, b in zip(*parts, strict=True)])
    samples, correct, top5, _ = sums[0]
    assert samples == 37
    assert 0 < correct < top5 <= 37


def test_two_ranks_count_what_one_process_counts(ranks: list[Found], alone: Found) -> None:
    """The weights agree to rounding, and so do the hits."""
    expected = alone["plain"]["evaluated"]["sum"]
    found = ranks[0]["plain"]["evaluated"]["sum"]
    assert found[:3] == expected[:3]
    assert found[3] == pytest.approx(expected[3], rel=1e-4)
