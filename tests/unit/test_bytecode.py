"""Where processes get compiled bytecode from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from raytrain_opt import bytecode


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of packages without bytecode that stand for Ray and torch."""
    for name in ("ray", "torch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.setattr(bytecode, "_file", lambda name: str(tmp_path / name / "__init__.py"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    return tmp_path


def test_packages_with_bytecode_need_nothing(packages: Path) -> None:
    assert bytecode.packages_without_bytecode() == ["ray", "torch"]
    for name in ("ray", "torch"):
        folder = packages / name / "__pycache__"
        folder.mkdir()
        (folder / f"__init__.{sys.implementation.cache_tag}.pyc").touch()
    assert bytecode.packages_without_bytecode() == []
    assert bytecode.bytecode_environment() == {}


def test_python_writes_it_beside_the_modules_where_it_can(packages: Path) -> None:
    assert bytecode.bytecode_environment() == {}


def test_a_cache_folder_where_writing_is_forbidden(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    variables = bytecode.bytecode_environment()
    assert variables["PYTHONPYCACHEPREFIX"].endswith("/.cache/raytrain_opt/bytecode")
    assert variables["PYTHONDONTWRITEBYTECODE"] == ""


def test_a_cache_folder_where_the_environment_cannot_be_written(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bytecode.os, "access", lambda *_: False)
    assert "PYTHONPYCACHEPREFIX" in bytecode.bytecode_environment()


def test_a_folder_of_the_users_choice_stays(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", "/elsewhere")
    assert bytecode.bytecode_environment() == {}
