"""The names that `from raytrain_opt import ...` offers."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import raytrain_opt


def test_run_is_the_driver() -> None:
    import_module("raytrain_opt.execution.signals")
    assert raytrain_opt.run is import_module("raytrain_opt.driver").run


def test_no_subpackage_hides_a_public_name() -> None:
    modules = {path.stem for path in Path(raytrain_opt.__file__).parent.iterdir()}
    assert modules.isdisjoint(raytrain_opt.__all__)
