"""Messages of gradients on two processes: the same results in torch's buckets and listed ones.

All cases run once, in `bucket_rank.py`; the tests read its results.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from raytrain_opt.train.data_parallel import bucket_arguments
from tests.multiprocess.bucket_rank import LISTED, LR, MICRO_BATCHES, STEPS, factor
from tests.support.process_group import run_ranks

LAYER = (512 * 512 + 512) * 4
BUCKETS = ["torch", "listed"]

RankResults = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[RankResults]:
    return run_ranks("tests.multiprocess.bucket_rank", 2, tmp_path_factory.mktemp("ranks") / "run")


@pytest.mark.parametrize("buckets", BUCKETS)
def test_every_gradient_counts_once(ranks: list[RankResults], buckets: str) -> None:
    """Compared with sums of integers, which are exact in any order."""
    each = [
        sum(factor(s, *at) for at in product(range(2), range(MICRO_BATCHES))) for s in range(STEPS)
    ]
    for results in ranks:
        state = results["exact"][buckets]["state"]
        parameters = [value for name, value in state.items() if "pattern" not in name]
        for index, weights in enumerate(parameters):
            pattern = state[f"pattern{index}"]
            assert torch.equal(weights, -LR * sum(each) / 2 * pattern)
            gradient = results["exact"][buckets]["gradients"][index]
            assert torch.equal(gradient, each[-1] / 2 * pattern)


def test_two_processes_get_the_same_bits_in_any_buckets(ranks: list[RankResults]) -> None:
    for results in ranks:
        real = results["real"]
        assert all(gradient.norm() > 0.01 for gradient in real["listed"]["gradients"])
        for name, value in real["torch"]["state"].items():
            assert torch.equal(real["listed"]["state"][name], value), name


@pytest.mark.parametrize("buckets", BUCKETS)
def test_weights_are_equal_and_running_statistics_are_per_process(
    ranks: list[RankResults], buckets: str
) -> None:
    first, other = (results["real"][buckets]["state"] for results in ranks)
    for name, value in first.items():
        assert torch.equal(value, other[name]) == ("running" not in name)


@pytest.mark.skipif("bucket_cap_mb" in bucket_arguments(LISTED), reason="torch takes one size")
def test_listed_buckets_are_sent_once_per_update(ranks: list[RankResults]) -> None:
    """A bucket is complete with the gradient that reaches its size: 1 MiB, then 2 MiB."""
    for results in ranks:
        sent = results["exact"]["listed"]["messages"]
        assert len(sent) == STEPS
        # DDP knows the order of the backward pass from the second step on.
        assert sent[2:] == sent[1:-1]
        assert all(sum(sizes) == 5 * LAYER for sizes in sent)
        assert [round(size / 2**20) for size in sent[-1]] == [1, 2, 2]


@pytest.mark.parametrize(
    ("form", "dtype", "error"), [("bf16", torch.bfloat16, 2**-7), ("fp16", torch.float16, 2**-10)]
)
def test_compressed_gradients_are_close_and_were_sent_compressed(
    ranks: list[RankResults], form: str, dtype: torch.dtype, error: float
) -> None:
    for results in ranks:
        compressed, exact = (results["constant_weights"][f]["gradients"] for f in (form, "none"))
        for gradient, reference in zip(compressed, exact, strict=True):
            assert (gradient - reference).norm() <= error * reference.norm()
            assert torch.equal(gradient, gradient.to(dtype).float())


def test_an_early_connection_does_not_block_its_process(ranks: list[RankResults]) -> None:
    assert all(0 < results["connected_s"] < 60 for results in ranks)
