"""Ranks hold the same weights after each phase, or the run ends; a candidate that raises does not.

All runs are in `drift_rank.py`; the tests read their results.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiprocess.drift_rank import CASES, PLACES
from tests.support.process_group import run_ranks

EXPECTED = {
    "max_norm": "embedding.weight",
    "write": "first.bias",
    "state": "mean of embedding.weight in the optimizer",
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks("tests.multiprocess.drift_rank", 2, tmp_path_factory.mktemp("two") / "run")


@pytest.mark.parametrize("case", EXPECTED)
def test_weights_that_differ_are_an_error_with_their_names(
    ranks: list[dict[str, Any]], case: str
) -> None:
    for results in ranks:
        error, *_ = results[case]
        assert "in epoch 1 the workers hold different values" in error
        assert EXPECTED[case] in error


@pytest.mark.parametrize("case", [*sorted({*CASES} - {*EXPECTED}), "unlike processors"])
def test_equal_weights_are_none(ranks: list[dict[str, Any]], case: str) -> None:
    """Noise of an optimizer is alike; NaN equals NaN; counters become those of rank 0."""
    first, second = (results[case] for results in ranks)
    assert first[0] == ""
    assert first == second


@pytest.mark.parametrize(("place", "failed_pass"), PLACES)
def test_a_candidate_that_raises_on_one_rank_has_diverged_on_all(
    ranks: list[dict[str, Any]], place: str, failed_pass: int
) -> None:
    (results, digest), (_, other_digest) = (r["candidates"][place, failed_pass] for r in ranks)
    first, failed, last = results
    assert [failed[0], last[0]] == ["diverged", "ok"]
    assert ("planted: " + place in failed[1]) or (place == "forward" and "str" in failed[1])
    assert first == last
    assert digest == other_digest == ranks[0]["candidates"][PLACES[0]][1]


def test_what_no_rate_avoids_is_raised_where_it_happened(ranks: list[dict[str, Any]]) -> None:
    assert [results["always"] for results in ranks] == ["", "planted: evaluation"]
