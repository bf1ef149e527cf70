"""Two processes with DDP over gloo, against one process that computes both shares.

All phases run once, in `rank.py`; the tests read what it left.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

LIMIT_S = 100
RANK_PY = Path(__file__).with_name("rank.py")
MODELS = ["plain", "small_cnn"]

Found = dict[str, Any]


def run_ranks(world_size: int, folder: Path) -> list[Found]:
    """What each of the processes found. Fails with the output of the one that failed."""
    folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, RANK_PY, str(rank), str(world_size), folder],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        for process in started:
            output, _ = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, output
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(world_size)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return run_ranks(2, tmp_path_factory.mktemp("two") / "run")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Found:
    [found] = run_ranks(1, tmp_path_factory.mktemp("one") / "run")
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


@pytest.mark.parametrize("model", MODELS)
def test_the_ranks_share_the_batch(ranks: list[Found], alone: Found, model: str) -> None:
    totals = [found[model]["totals"] for found in ranks]
    assert [each["samples"] for each in totals] == [6 * 16, 6 * 16]
    assert alone[model]["totals"]["samples"] == 6 * 32
    assert totals[0]["loss_sum"] != totals[1]["loss_sum"]


def test_the_ranks_losses_add_up_to_those_of_one_process(ranks: list[Found], alone: Found) -> None:
    together = sum(found["plain"]["totals"]["loss_sum"] for found in ranks)
    assert together == pytest.approx(alone["plain"]["totals"]["loss_sum"], rel=1e-4)


def test_running_statistics_are_the_mean_over_the_ranks(ranks: list[Found]) -> None:
    own = [found["small_cnn"]["own_buffers"] for found in ranks]
    statistics = [name for name, value in own[0].items() if value.is_floating_point()]
    assert len(statistics) == 6
    for name in statistics:
        assert not torch.equal(own[0][name], own[1][name])
        mean = (own[0][name] + own[1][name]) / 2
        for found in ranks:
            torch.testing.assert_close(found["small_cnn"]["averaged_buffers"][name], mean)


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
