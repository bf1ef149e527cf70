"""The standalone Python example of the documentation, run exactly as it is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

PAGE = Path(__file__).parents[3] / "docs" / "own-model-and-data.md"


@pytest.mark.timeout(600)
def test_the_example_with_own_model_and_data_runs(tmp_path: Path, local_ray: Cluster) -> None:
    """On the Ray of these tests, which saves the start of another one."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    (example,) = [block for block in blocks if "__main__" in block]
    script = tmp_path / "example.py"
    script.write_text(example, encoding="utf-8")
    process = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": local_ray.address},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert list(tmp_path.glob("runs/*/result.json"))
