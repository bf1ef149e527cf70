"""CUDA graphs of the network beside DDP, with graphs that a CPU replays.

All cases run in `graph_rank.py`; the tests read its results.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiprocess.graph_rank import CASES, MICRO_BATCHES, STEPS
from tests.support.process_group import run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks("tests.multiprocess.graph_rank", 2, tmp_path_factory.mktemp("ranks") / "run")


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_have_the_weights_of_a_training_without(
    ranks: list[dict[str, Any]], case: str
) -> None:
    digests = {digest for rank in ranks for digest in rank[case]["digests"]}
    assert len(digests) == 1


@pytest.mark.parametrize("case", ["SGD", "Muon"])
def test_the_second_and_third_epoch_ran_as_graphs(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        assert rank[case]["used"]
        assert rank[case]["replayed"] >= 2 * STEPS * MICRO_BATCHES / len(ranks)


def test_no_rank_uses_graphs_if_one_cannot(ranks: list[dict[str, Any]]) -> None:
    refused = [rank["LARS"]["measured"]["graph_refused"] for rank in ranks]
    assert refused == ["another worker cannot", "RuntimeError: planted failure"]
    assert [rank["LARS"]["used"] for rank in ranks] == [False, False]
