"""The Python code of a document, as a module that a test can use."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"<!-- example: [^>]*-->\n```python\n(.*?)```", re.DOTALL)


def example(
    document: str, word: str, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str = "example"
) -> ModuleType:
    """Import the example of a document that contains `word`; processes started later can, too."""
    blocks = _BLOCK.findall((DOCS / document).read_text(encoding="utf-8"))
    [code] = [block for block in blocks if word in block]
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{':'.join(sys.path[1:])}")
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)
