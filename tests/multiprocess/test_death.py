"""A worker dies within a step: the others still have the steps before, and these are enough."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.multiprocess.death_rank import CASES, DEATH
from tests.support.process_group import run_ranks

RANKS = "tests.multiprocess.death_rank"


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_what_is_left_continues_as_if_nobody_had_died(
    case: str, world_size: int, tmp_path: Path
) -> None:
    for folder in ("alone", "several"):
        (tmp_path / folder).mkdir()
    [alone] = run_ranks(RANKS, 1, tmp_path / "alone" / case)
    *others, dead = run_ranks(RANKS, world_size, tmp_path / "several" / case)
    assert dead == {}
    for results in others:
        *counts, loss = results["totals"]
        assert counts == [DEATH, DEATH * 64, 0]
        assert loss == pytest.approx(alone["totals"][-1], rel=0.2)  # that of its own samples
        for name in ("weights", "end"):
            for parameter, expected in alone[name].items():
                torch.testing.assert_close(
                    results[name][parameter], expected, rtol=2e-5, atol=2e-5
                )
