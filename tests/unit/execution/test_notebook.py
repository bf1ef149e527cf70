"""The notebook of the documentation, run as it is printed, but without Ray."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[3] / "docs" / "quickstart.ipynb"
WITHOUT_RAY = """import functools, raytrain_opt
raytrain_opt.run = functools.partial(raytrain_opt.run, in_process=True)"""


def test_the_notebook_shows_the_progress_and_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(WITHOUT_RAY))
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=500, kernel_name="python3", resources=resources).execute()
    _, training, numbers, report = (
        "".join(str(output.get("text") or output.get("data")) for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    )
    assert "epoch 4/4  lr " in training
    assert "of the test images after" in numbers
    assert "iframe srcdoc" in report
    assert "Loss over epochs" in report
