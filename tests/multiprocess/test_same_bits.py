"""One digest for a training in all cells of `benchmarks.same_bits`, for two of its jobs."""

from __future__ import annotations

import pytest

from benchmarks.same_bits import CELLS, train_cell


@pytest.mark.parametrize(
    "job", ["batch norm", pytest.param("transformer", marks=pytest.mark.slow)]
)
def test_any_workers_and_shares_give_the_same_bits(job: str) -> None:
    cells = ["in process", "random shares", "elastic"]
    assert len({train_cell(job, CELLS[cell], 2) for cell in cells}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("job", ["growing batch", "uneven", "fine-tuning"])
def test_any_other_job_too(job: str) -> None:
    cells = ["in process", "4 workers", "killed"]
    assert len({train_cell(job, CELLS[cell], 2) for cell in cells}) == 1
