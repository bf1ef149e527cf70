"""Two processes with DDP over gloo, against one process that computes both micro-batches.

All phases run once, in `rank.py`; the tests read its results.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.process_group import run_ranks

RANKS = "tests.multiprocess.rank"
MODELS = ["plain", "small_cnn"]
AVERAGING = ["ema", "schedule_free"]

RankResults = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[RankResults]:
    return run_ranks(RANKS, 2, tmp_path_factory.mktemp("two") / "run")


@pytest.fixture(scope="module")
def single_process(tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    [results] = run_ranks(RANKS, 1, tmp_path_factory.mktemp("one") / "run")
    return results


@pytest.mark.parametrize("model", MODELS + AVERAGING)
def test_both_ranks_hold_the_same_state_after_training(
    ranks: list[RankResults], model: str
) -> None:
    first, second = (results[model] for results in ranks)
    assert first["middle"] == second["middle"]
    assert first["end_digests"] == second["end_digests"]
    assert first["middle"] != first["end_digests"][0]


@pytest.mark.parametrize("model", MODELS + AVERAGING)
def test_a_phase_repeats_from_a_loaded_state(ranks: list[RankResults], model: str) -> None:
    """DDP continues with the parameters into which a state was copied."""
    once, again = ranks[0][model]["end_digests"]
    assert once == again


@pytest.mark.parametrize("case", ["plain", "clipped"])
def test_one_process_with_all_micro_batches_gives_the_same_weights(
    ranks: list[RankResults], single_process: RankResults, case: str
) -> None:
    for name, expected in single_process[case]["weights"].items():
        for results in ranks:
            torch.testing.assert_close(results[case]["weights"][name], expected, rtol=0, atol=1e-5)
        changed = single_process["plain"]["weights"][name] - expected
        assert (changed.abs().max() > 1e-3) == (case == "clipped")


@pytest.mark.parametrize(
    ("case", "samples"),
    [("2 planned", [5 * 11 + 4, 5 * 11 + 4]), ("3 planned", [5 * 22 + 12, 5 * 11 + 7])],
)
def test_the_remainder_of_an_epoch_is_one_update_on_as_many_or_fewer_workers_than_planned(
    ranks: list[RankResults], single_process: RankResults, case: str, samples: list[int]
) -> None:
    assert [results[case]["samples"] for results in ranks] == samples
    for name, expected in single_process[case]["weights"].items():
        for results in ranks:
            torch.testing.assert_close(results[case]["weights"][name], expected, rtol=0, atol=1e-5)


def test_a_stop_within_an_epoch_of_shards_changes_no_bit(
    ranks: list[RankResults], single_process: RankResults
) -> None:
    """The epoch ends with a smaller update, as `drop_last: false` wants."""
    shards = [results["shards"] for results in (*ranks, single_process)]
    for undisturbed, stopped, resumed in (part["digests"] for part in shards):
        assert undisturbed == resumed != stopped
    assert [part["samples"] for part in shards] == [[15, 8, 7], [15, 8, 7], [30, 16, 14]]
    assert shards[0]["digests"] == shards[1]["digests"]
    for name, expected in shards[2]["weights"].items():
        torch.testing.assert_close(shards[0]["weights"][name], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_each_rank_computes_half_of_the_batch(
    ranks: list[RankResults], single_process: RankResults, model: str
) -> None:
    totals = [results[model]["totals"] for results in ranks]
    assert [metrics["samples"] for metrics in totals] == [6 * 16, 6 * 16]
    assert single_process[model]["totals"]["samples"] == 6 * 32
    assert totals[0]["loss_sum"] != totals[1]["loss_sum"]


def test_the_ranks_losses_add_up_to_those_of_one_process(
    ranks: list[RankResults], single_process: RankResults
) -> None:
    together = sum(results["plain"]["totals"]["loss_sum"] for results in ranks)
    assert together == pytest.approx(single_process["plain"]["totals"]["loss_sum"], rel=1e-4)


def test_running_statistics_are_pooled_over_the_ranks(ranks: list[RankResults]) -> None:
    """Tested exactly in `test_batchnorm`; these averages have sampling noise of 1e-3 at most."""
    own_buffers = [results["small_cnn"]["own_buffers"] for results in ranks]
    statistics = [name for name, value in own_buffers[0].items() if value.is_floating_point()]
    assert len(statistics) == 6
    for name in statistics:
        assert not torch.equal(own_buffers[0][name], own_buffers[1][name])
        expected = (own_buffers[0][name] + own_buffers[1][name]) / 2
        rtol = 1e-6
        if name.endswith("running_var"):
            mean_name = name.replace("running_var", "running_mean")
            expected += ((own_buffers[0][mean_name] - own_buffers[1][mean_name]) / 2).square()
            rtol = 1e-3
        for results in ranks:
            averaged = results["small_cnn"]["averaged_buffers"][name]
            torch.testing.assert_close(averaged, expected, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("case", AVERAGING)
def test_averaged_weights_have_the_statistics_of_one_process(
    ranks: list[RankResults], single_process: RankResults, case: str
) -> None:
    """They are recomputed at the averaged weights, on 20 batches or on 10 of each worker."""
    for name, expected in single_process[case]["averaged_buffers"].items():
        first, second = (results[case]["averaged_buffers"][name] for results in ranks)
        assert torch.equal(first, second)
        assert not torch.equal(first, ranks[0][case]["own_buffers"][name])
        if name.endswith("running_mean"):
            torch.testing.assert_close(first, expected, rtol=0.2, atol=0.1)


def test_counters_stay_exact(ranks: list[RankResults]) -> None:
    for results in ranks:
        averaged = results["small_cnn"]["averaged_buffers"]
        counts = [v for v in averaged.values() if not v.is_floating_point()]
        assert [int(count) for count in counts] == [2**24 + 1 + 6] * 3


def test_sums_are_over_all_ranks_in_double_precision(ranks: list[RankResults]) -> None:
    assert [results["reduced"] for results in ranks] == [[3.0, 2e15 + 1]] * 2


@pytest.mark.parametrize("model", MODELS)
def test_every_test_sample_counts_once(
    ranks: list[RankResults], single_process: RankResults, model: str
) -> None:
    parts = [results[model]["evaluated"]["part"] for results in ranks]
    sums = [results[model]["evaluated"]["sum"] for results in ranks]
    assert [part[0] for part in parts] == [16, 21]  # one block, and two
    assert sums[0] == sums[1] == pytest.approx([a + b for a, b in zip(*parts, strict=True)])
    samples, correct, top5, _ = sums[0]
    assert samples == 37
    assert 0 < correct < top5 <= 37


def test_two_ranks_count_what_one_process_counts(
    ranks: list[RankResults], single_process: RankResults
) -> None:
    """The weights agree up to rounding, and so do the predictions."""
    expected = single_process["plain"]["evaluated"]["sum"]
    sums = ranks[0]["plain"]["evaluated"]["sum"]
    assert sums[:3] == expected[:3]
    assert sums[3] == pytest.approx(expected[3], rel=1e-4)


def test_the_parts_for_large_batches_train_together(ranks: list[RankResults]) -> None:
    first, second = (results["large_batch"] for results in ranks)
    assert first["digest"] == second["digest"]
    report = first["report"]
    assert (report["gradient_buckets"], report["compression"]) == ([1, 2], "bf16")
    samples, correct, *_ = first["evaluated"]["sum"]
    assert correct > 0.8 * samples
