"""Gradient norms of two and of four processes, against those of each one's gradients by hand;
and that looking at them changes no bit.

All cases run once for each number of processes, in `noise_rank.py`; the tests read what it left.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

RANK_PY = Path(__file__).with_name("noise_rank.py")
STILL_STEPS = 2

Found = dict[str, Any]


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return run_ranks(RANK_PY, request.param, tmp_path_factory.mktemp("ranks") / "run")


@pytest.mark.parametrize(
    ("case", "shares", "error"),
    [
        ("plain", 1, 1e-5),
        ("shares", 2, 1e-5),
        ("growing", 1, 1e-5),
        # Only the mean has travelled in that form.
        ("bf16 messages", 1, 1e-2),
        ("fp16", 1, 1e-2),
    ],
)
def test_norms_are_those_of_all_gradients(
    ranks: list[Found], case: str, shares: int, error: float
) -> None:
    small = 16
    for found in ranks:
        norms = found["still"][case]["norms"]
        assert norms["small_batch"] == small
        assert norms["big_batch"] == small * shares * len(ranks)
        assert len(norms["pairs"]) == STILL_STEPS
        for step, pair in enumerate(norms["pairs"]):
            gradients = [g for each in ranks for g in each["still"][case]["gradients"][step]]
            assert len(gradients) == shares * len(ranks)
            own = sum(float(g.square().sum()) for g in gradients) / len(gradients)
            whole = float(torch.stack(gradients).mean(dim=0).square().sum())
            assert pair == pytest.approx((own, whole), rel=error)
            assert whole < 0.99 * own


def test_all_ranks_get_the_same(ranks: list[Found]) -> None:
    for case in ranks[0]["still"]:
        assert all(r["still"][case]["norms"] == ranks[0]["still"][case]["norms"] for r in ranks)


@pytest.mark.parametrize("case", ["default", "growing", "bf16", "fp16", "batchnorm"])
def test_training_is_the_same_to_the_bit(ranks: list[Found], case: str) -> None:
    for found in ranks:
        watched, plain = found["trained"][case]
        assert watched["state"] == plain["state"]
        for one, other in zip(watched["weights"], plain["weights"], strict=True):
            assert torch.equal(one, other)
        assert watched["pairs"] == [5, 1]
        assert plain["pairs"] == [0, 0]
