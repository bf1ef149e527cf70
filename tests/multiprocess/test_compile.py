"""torch's own compiler on CPU: against eager steps, and a resume in a new process."""

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
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of an uninterrupted run and of a process that continues it."""
    folder = tmp_path_factory.mktemp("compile")
    names = ("uninterrupted", "continued")
    return [run_ranks("tests.multiprocess.compile_rank", 1, folder / name)[0] for name in names]


def test_compiled_steps_equal_eager_ones_within_rounding(runs: list[dict[str, Any]]) -> None:
    eager, compiled = runs[0]["off"], runs[0]["default"]
    assert runs[0]["graphs"] > 0
    assert compiled["loss"] == pytest.approx(eager["loss"], rel=1e-4)
    torch.testing.assert_close(compiled["weights"], eager["weights"], rtol=1e-4, atol=1e-5)


def test_a_compiled_run_resumes_bit_by_bit_in_a_new_process(runs: list[dict[str, Any]]) -> None:
    uninterrupted, continued = runs
    assert continued["graphs"] > 0
    assert continued["end"] == uninterrupted["end"]
