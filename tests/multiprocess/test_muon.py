"""Muon in data parallelism: ranks share the orthogonalization and hold the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.process_group import run_ranks

RANKS = "tests.multiprocess.muon_rank"
MATRICES = 5
DTYPES = ["float32", "bfloat16"]

RankResults = dict[str, Any]


@pytest.fixture(scope="module", params=[2, 4], ids=["two", "four"])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[RankResults]:
    return run_ranks(RANKS, request.param, tmp_path_factory.mktemp("ranks") / "run")


@pytest.fixture(scope="module")
def single_process(tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    [results] = run_ranks(RANKS, 1, tmp_path_factory.mktemp("one") / "run")
    return results


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ranks_hold_the_same_bits_and_repeat_them(
    ranks: list[RankResults], dtype: str
) -> None:
    digests = {digest for results in ranks for digest in results[dtype]["ends"]}
    assert len(digests) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ranks_share_the_matrices(
    ranks: list[RankResults], single_process: RankResults, dtype: str
) -> None:
    work = [results[dtype]["matrices_per_step"] for results in ranks]
    assert single_process[dtype]["matrices_per_step"] == sum(work) == MATRICES
    assert max(work) <= MATRICES // len(ranks) + 1


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-4), ("bfloat16", 0.03)])
def test_one_process_gives_the_same_weights_up_to_rounding(
    ranks: list[RankResults], single_process: RankResults, dtype: str, atol: float
) -> None:
    for name, expected in single_process[dtype]["weights"].items():
        actual = ranks[0][dtype]["weights"][name]
        torch.testing.assert_close(actual, expected, rtol=0, atol=atol, msg=name)
