"""The Python example of the documentation, run exactly as it is printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from tests.support.small_jobs import read_lines

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.timeout(600)
def test_the_example_with_own_model_and_data_runs(tmp_path: Path, local_ray: Cluster) -> None:
    """Its candidates are trained by all workers, of which one is killed meanwhile. On the Ray of
    these tests, which saves the start of another one; the network starts as it does with seed 0.
    """
    fault = {"role": "worker", "index": 1, "phase": "pretrain", "step": 7}
    text = (DOCS / "own-model-and-data.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (example,) = [block for block in blocks if "__main__" in block]
    (tmp_path / "example.py").write_text(example, encoding="utf-8")
    program = f"""
import runpy, torch
from tests.support.faults import injected
torch.manual_seed(0)
with injected([{fault}]):
    runpy.run_path("example.py", run_name="__main__")
"""
    process = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(DOCS.parent), "RAY_ADDRESS": local_ray.address},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    (result,) = tmp_path.glob("runs/*/result.json")
    summary = json.loads(result.read_text())
    assert (summary["restarts"], summary["hardware"]["slots"]) == ({"worker": 2}, 0)
    assert summary["final"]["test_metrics"]["accuracy"] > 0.9
    rounds = read_lines(str(result.parent), "rounds")
    assert {line["search_on"] for line in rounds} == {"workers"}
    assert {c["optimizer"] for line in rounds for c in line["candidates"]} > {"Muon", "SGD"}
    assert {c["slot"] for line in rounds for c in line["candidates"]} == {-1}
