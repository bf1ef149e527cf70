"""Unequal shares of every step, against one process that computes all micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.multiprocess.balanced_rank import LRS, OPTIMIZERS, OTHER_SPEEDS
from tests.support.process_group import run_ranks

RANKS = "tests.multiprocess.balanced_rank"
RankResults = dict[str, Any]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    [results] = run_ranks(RANKS, 1, tmp_path_factory.mktemp("one") / "run")
    return results


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(RANKS, request.param, tmp_path_factory.mktemp("several") / "run")


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_unequal_shares_give_the_weights_of_one_process(
    ranks: list[RankResults], alone: RankResults, case: str
) -> None:
    """Dropout included; in two epochs, the second with a larger batch."""
    tolerance = 1e-2 if case == "bf16" else 2e-5
    for results in ranks:
        for name, expected in alone[case]["weights"].items():
            torch.testing.assert_close(
                results[case]["weights"][name], expected, rtol=tolerance, atol=tolerance
            )


def test_statistics_count_every_micro_batch_once(
    ranks: list[RankResults], alone: RankResults
) -> None:
    """Means over all batches are exact, wherever they were computed; variances nearly."""
    mean, var, tracked = alone["SGD"]["statistics"].values()
    for results in ranks:
        own_mean, own_var, own_tracked = results["SGD"]["statistics"].values()
        torch.testing.assert_close(own_mean, mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(own_var, var, rtol=2e-3, atol=0)
        assert own_tracked == tracked // len(ranks)


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_given_speeds_repeat_to_the_bit_on_all_ranks(ranks: list[RankResults], case: str) -> None:
    digests = {digest for results in ranks for digest in results[case]["digests"]}
    assert len(digests) == 1


def test_each_rank_computes_its_share(ranks: list[RankResults]) -> None:
    shares = {2: ([2, 6], [4, 12]), 4: ([1, 4, 1, 2], [1, 8, 2, 5])}[len(ranks)]
    for epoch, micro_batches in enumerate(shares):
        samples = [results["SGD"]["samples"][epoch] for results in ranks]
        assert samples == [8 * len(LRS) * number for number in micro_batches]


@pytest.mark.parametrize("case", OTHER_SPEEDS[4])
def test_any_shares_give_the_weights_of_synchronous_training(
    ranks: list[RankResults], alone: RankResults, case: str
) -> None:
    samples = [results[case]["samples"][0] for results in ranks]
    assert (len(set(samples)) == 1) == (case == "equal")
    for results in ranks:
        for name, weights in results[case]["weights"].items():
            for expected in (results["sync"]["weights"], alone["sync"]["weights"]):
                torch.testing.assert_close(weights, expected[name], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_given_speeds_continue_in_a_new_learner_with_the_same_bits(
    ranks: list[RankResults], case: str
) -> None:
    """In the middle of an epoch; of more than two ranks, a new DDP may add in another order."""
    tolerance = 1e-2 if case == "bf16" else 2e-5
    for results in ranks:
        if len(ranks) == 2:
            assert results[case]["resumed_digest"] == results[case]["digests"][0]
        for name, expected in results[case]["weights"].items():
            resumed = results[case]["resumed"][name]
            torch.testing.assert_close(resumed, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", ["SGD", *OTHER_SPEEDS[4]])
def test_the_noise_scale_is_that_of_synchronous_training(
    ranks: list[RankResults], alone: RankResults, case: str
) -> None:
    """One process measures none; the ranks' pairs are the same whatever their shares are."""
    assert alone["SGD"]["norms"] is None
    for results in ranks:
        mean_square, square_of_mean = results[case]["norms"][0]
        assert mean_square > square_of_mean > 0
        assert torch.equal(results[case]["norms"], ranks[0][case]["norms"])
        torch.testing.assert_close(
            results[case]["norms"], results["sync"]["norms"], rtol=1e-4, atol=0
        )


@pytest.mark.parametrize("mode", ["balanced", "loaders", "auto"])
def test_a_slow_rank_gets_a_smaller_share(ranks: list[RankResults], mode: str) -> None:
    """Balanced from the sixth update on; auto from the next phase on."""
    first, *later = ranks[0][mode]["samples"]
    assert all(sum(samples) == 7 * 64 for samples in (first, *later))
    assert later[-1][-1] < min(later[-1][:-1])
    if mode == "auto":
        assert len(set(first)) == 1


@pytest.mark.parametrize("mode", ["balanced", "loaders", "auto"])
def test_measured_shares_give_equal_weights_on_all_ranks(
    ranks: list[RankResults], alone: RankResults, mode: str
) -> None:
    first, *others = (results[mode]["weights"] for results in ranks)
    for other in others:
        assert all(torch.equal(first[name], value) for name, value in other.items())
    if mode != "auto":  # its first phase has other micro-batches, with other dropout
        for name, expected in alone[mode]["weights"].items():
            torch.testing.assert_close(first[name], expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("mode", ["balanced", "loaders", "auto"])
def test_a_stopped_phase_continues_with_its_shares_in_a_new_process(
    ranks: list[RankResults], mode: str
) -> None:
    """Each sample counts once, so that only the order of additions differs."""
    stopped, rest = ranks[0][mode]["parts"]
    assert (sum(stopped), sum(rest)) == (2 * 64, 5 * 64)
    assert [samples / 2 for samples in stopped] == [samples / 5 for samples in rest]
    assert rest[-1] < max(rest)
    for results in ranks:
        for name, expected in results[mode]["at_once"].items():
            torch.testing.assert_close(
                results[mode]["resumed"][name], expected, rtol=1e-4, atol=2e-5
            )
