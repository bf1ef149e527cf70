"""Workers decide as a slot does, and continue a training that was stopped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.process_group import run_ranks

Results = dict[str, Any]


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Results]]:
    """Return the results of each rank by size of the group."""
    module, folder = "tests.multiprocess.candidates_rank", tmp_path_factory.mktemp("candidates")
    return {size: run_ranks(module, size, folder / str(size)) for size in (1, 2, 4)}


def test_one_worker_computes_what_a_slot_computes(groups: dict[int, list[Results]]) -> None:
    [results] = groups[1]
    for name, expected in results["slot"].items():
        assert results["worker"][name] == expected


@pytest.mark.parametrize("size", [2, 4])
def test_several_workers_decide_as_a_slot(groups: dict[int, list[Results]], size: int) -> None:
    expected = groups[1][0]["slot"]
    first, *others = (results["worker"] for results in groups[size])
    assert [t[:3] for t in first["tried"]] == [t[:3] for t in expected["tried"]]
    losses = [[loss for *_, loss in r["tried"]] for r in (first, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert first["optimizer"] == expected["optimizer"]
    assert first["peak"] == pytest.approx(expected["peak"], rel=1e-4)
    assert [r["losses"] for r in others] == [[]] * (size - 1)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_candidates_have_the_order_of_those_on_a_slot(
    groups: dict[int, list[Results]], size: int
) -> None:
    """Averages of BatchNorm differ: workers pool theirs, a slot updates them more often."""
    losses = groups[size][0]["worker"]["losses"]
    expected = groups[1][0]["slot"]["losses"]
    assert losses == pytest.approx(expected, rel=0.1)
    assert np.argsort(losses).tolist() == np.argsort(expected).tolist()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_workers_continue_from_the_candidate_without_loading_it(
    groups: dict[int, list[Results]], size: int
) -> None:
    results = [rank["worker"] for rank in groups[size]]
    assert len({result["digest"] for result in results}) == 1
    assert [result["sent"] for result in results] == [results[0]["digest"]] + [None] * (size - 1)
    assert [result["began_from"] for result in results] == [results[0]["digest"]] * size
    assert [result["reads"] for result in results] == [1] * size  # the start of the round


@pytest.mark.parametrize("size", [1, 2, 4])
def test_restarted_workers_train_the_candidate_again(
    groups: dict[int, list[Results]], size: int
) -> None:
    for rank in groups[size]:
        assert rank["worker"]["digest_after_restart"] == rank["worker"]["digest"]


@pytest.mark.parametrize("weights", ["averaged", "plain", "schedule-free"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_workers_that_are_stopped_within_an_epoch_continue_bit_for_bit(
    groups: dict[int, list[Results]], size: int, weights: str
) -> None:
    """BatchNorm's statistics are computed anew for averaged weights, and pooled for others.

    Several workers measure the noise of three steps, one of them before the stop.
    """
    for rank in groups[size]:
        epoch = rank["worker"][weights]
        assert epoch["stopped_after"] == 2
        assert epoch["stopped"] == epoch["at_once"]
        pairs = epoch["at_once"][-1]
        assert pairs is None if size == 1 else len(pairs) == 3
