"""torch's own compiler on two processes: against eager steps, a resume, and how often it runs."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch

from tests.support.process_group import run_ranks

pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """The results by rank of an uninterrupted run and of one that continues it."""
    folder = tmp_path_factory.mktemp("compile")
    names = ("uninterrupted", "continued")
    return [run_ranks("tests.multiprocess.compile_rank", 2, folder / name) for name in names]


def test_compiled_steps_equal_eager_ones_within_rounding(runs: list[list[dict[str, Any]]]) -> None:
    for rank in runs[0]:
        eager, compiled = rank["off"], rank["default"]
        assert compiled["loss"] == pytest.approx(eager["loss"], rel=1e-4)
        torch.testing.assert_close(compiled["weights"], eager["weights"], rtol=1e-4, atol=1e-5)


def test_each_graph_is_compiled_once_per_node(runs: list[list[dict[str, Any]]]) -> None:
    one, other = runs[0]
    assert one["graphs"] == other["graphs"] > 0
    assert one["compiled"] == other["found"]
    assert one["found"] == other["compiled"]
    assert one["compiled"] + other["compiled"] == 2 * one["graphs"]  # forward and backward
    assert [rank["compiled"] for rank in runs[1]] == [0, 0]


def test_a_compiled_run_resumes_bit_by_bit_in_new_processes(
    runs: list[list[dict[str, Any]]],
) -> None:
    for uninterrupted, continued in zip(*runs, strict=True):
        assert continued["graphs"] > 0
        assert continued["end"] == uninterrupted["end"]
