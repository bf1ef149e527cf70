"""Gradient norms of two and of four processes, against norms of the ranks' gradients.

Measuring them changes no bit of the training. All cases run once for each number of processes, in
`noise_rank.py`; the tests read its results.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.process_group import run_ranks

RANKS = "tests.multiprocess.noise_rank"
CONSTANT_STEPS = 2

RankResults = dict[str, Any]


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[RankResults]:
    return run_ranks(RANKS, request.param, tmp_path_factory.mktemp("ranks") / "run")


@pytest.mark.parametrize(
    ("case", "micro_batches", "error"),
    [
        ("plain", 1, 1e-5),
        ("accumulation", 2, 1e-5),
        # Only the mean over the ranks was sent in bf16.
        ("bf16 messages", 1, 1e-2),
        ("fp16", 1, 1e-2),
    ],
)
def test_norms_equal_the_norms_of_all_gradients(
    ranks: list[RankResults], case: str, micro_batches: int, error: float
) -> None:
    per_rank = 16
    for results in ranks:
        norms = results["constant_weights"][case]["norms"]
        assert norms["small_batch"] == per_rank
        assert norms["big_batch"] == per_rank * micro_batches * len(ranks)
        assert len(norms["pairs"]) == CONSTANT_STEPS
        for step, pair in enumerate(norms["pairs"]):
            gradients = [
                g for rank in ranks for g in rank["constant_weights"][case]["gradients"][step]
            ]
            assert len(gradients) == micro_batches * len(ranks)
            small_norm = sum(float(g.square().sum()) for g in gradients) / len(gradients)
            big_norm = float(torch.stack(gradients).mean(dim=0).square().sum())
            assert pair == pytest.approx((small_norm, big_norm), rel=error)
            assert big_norm < 0.99 * small_norm


def test_all_ranks_get_the_same(ranks: list[RankResults]) -> None:
    for case in ranks[0]["constant_weights"]:
        assert all(
            r["constant_weights"][case]["norms"] == ranks[0]["constant_weights"][case]["norms"]
            for r in ranks
        )


@pytest.mark.parametrize("case", ["default", "bf16", "fp16", "batchnorm"])
def test_measuring_does_not_change_a_bit_of_the_training(
    ranks: list[RankResults], case: str
) -> None:
    for results in ranks:
        measured, plain = results["trained"][case]
        assert measured["state"] == plain["state"]
        for weight, plain_weight in zip(measured["weights"], plain["weights"], strict=True):
            assert torch.equal(weight, plain_weight)
        assert measured["pairs"] == [5, 1]
        assert plain["pairs"] == [0, 0]
