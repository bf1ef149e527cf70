"""Apply `--set a.b=c`: values from the command line replace those of a job file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raytrain_opt.config.error_messages import shown
from raytrain_opt.config.yaml_loader import MAX_DEPTH, read_yaml
from raytrain_opt.errors import JobError, Problem

# A job file may hold these as a bare name: `model: resnet8`.
_NAMED_SECTIONS = ("model", "data", "optimizer", "task", "loss")


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> list[Problem]:
    """Write each `path=value` into `raw`, in order; return the problems of failed overrides.

    The value is YAML. The path enters lists by index and creates missing sections; the schema
    checks later whether its keys exist.
    """
    problems = []
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        too_deep = len(keys) > MAX_DEPTH
        if too_deep or not equals or not all(keys):
            form = "an override has the form section.key=value"
            rule = f"a job has at most {MAX_DEPTH} levels" if too_deep else form
            problems.append(Problem("--set", rule, shown(override)))
            continue
        try:
            _put(raw, keys, read_yaml(text, source=override))
        except JobError as error:
            problems += [Problem(f"--set {path}", p.rule, p.value) for p in error.problems]
        except (LookupError, TypeError) as error:
            problems.append(Problem(f"--set {path}", str(error.args[0]), repr(text)))
    return problems


def _put(raw: dict[str, Any], keys: list[str], value: Any) -> None:
    """Write `value` at the path of `keys`."""
    container: Any = raw
    for depth, key in enumerate(keys[:-1]):
        index = _index(container, key, keys[:depth])
        inner = container[index] if isinstance(container, list) else container.get(index)
        if inner is None:
            inner = {}
        elif depth == 0 and key in _NAMED_SECTIONS and not isinstance(inner, dict | list):
            inner = {"name": inner}
        container[index] = inner
        container = inner
    container[_index(container, keys[-1], keys[:-1])] = value


def _index(container: Any, key: str, path: list[str]) -> Any:
    """Return what selects the value of `key` in a section or a list, which is at `path`."""
    if isinstance(container, dict):
        return key
    if not isinstance(container, list):
        raise TypeError(f"{'.'.join(path)} is a single value, it has no {key!r}")
    if not key.isdecimal() or int(key) >= len(container):
        last = len(container) - 1
        raise LookupError(f"{'.'.join(path)} is a list: give an index from 0 to {last}")
    return int(key)
