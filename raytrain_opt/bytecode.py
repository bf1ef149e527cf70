"""Bytecode of Ray and torch: without it, each process compiles them, for 5 to 8 s of CPU."""

from __future__ import annotations

import os
import sys
from importlib.util import cache_from_source, find_spec
from pathlib import Path

_CACHE = Path("~/.cache/raytrain_opt/bytecode")
_PACKAGES = ("ray", "torch")


def packages_without_bytecode() -> list[str]:
    """Return which of the large packages have no compiled bytecode; imports none of them."""
    return [name for name in _PACKAGES if not Path(cache_from_source(_file(name))).exists()]


def bytecode_environment() -> dict[str, str]:
    """Return variables that let new processes keep bytecode in the user's cache folder.

    None are needed, and the result is empty, where the packages have bytecode, or where Python
    writes it beside them: the folders can be written to, and nobody has forbidden it.
    """
    missing = packages_without_bytecode()
    writable = all(os.access(Path(_file(name)).parent, os.W_OK) for name in missing)
    if not missing or (writable and not sys.dont_write_bytecode) or sys.pycache_prefix:
        return {}
    return {"PYTHONPYCACHEPREFIX": str(_CACHE.expanduser()), "PYTHONDONTWRITEBYTECODE": ""}


def _file(package: str) -> str:
    spec = find_spec(package)
    assert spec is not None  # a dependency of this package
    assert spec.origin is not None
    return spec.origin
