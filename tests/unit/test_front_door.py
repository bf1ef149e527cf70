"""The names that `from raytrain_opt import ...` offers."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

import raytrain_opt


@pytest.mark.parametrize("name", raytrain_opt.__all__)
def test_every_public_name_can_be_called(name: str) -> None:
    assert callable(getattr(raytrain_opt, name))


def test_run_is_the_driver() -> None:
    import_module("raytrain_opt.execution.signals")
    assert raytrain_opt.run is import_module("raytrain_opt.driver").run


def test_no_subpackage_hides_a_public_name() -> None:
    modules = {path.stem for path in Path(raytrain_opt.__file__).parent.iterdir()}
    assert modules.isdisjoint(raytrain_opt.__all__)
