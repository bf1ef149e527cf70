"""Apply `--set a.b=c`: values from the command line replace those of a job file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raytrain_opt.config.error_messages import shown
from raytrain_opt.config.yaml_loader import MAX_DEPTH, read_yaml
from raytrain_opt.errors import JobError, Problem

# A job file may hold these as a bare name: `model: resnet8`.
_NAMED_SECTIONS = ("model", "data", "optimizer", "loss")


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> list[Problem]:
    """Write each `path=value` into `raw`, in order; return the problems of failed overrides.

    The value is YAML. The path enters lists by index and creates missing sections; the schema
    checks later whether its keys exist.
    """
    problems = []
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            rule = "an override has the form section.key=value"
            problems.append(Problem("--set", rule, shown(override)))
            continue
        if len(keys) > MAX_DEPTH:
            rule = f"a job has at most {MAX_DEPTH} levels"
            problems.append(Problem("--set", rule, shown(override)))
            continue
        try:
            _put(raw, keys, read_yaml(text, source=override))
        except JobError as error:
            problems += [Problem(f"--set {path}", p.rule, p.value) for p in error.problems]
        except (LookupError, TypeError) as error:
            problems.append(Problem(f"--set {path}", str(error.args[0]), repr(text), None))
    return problems


def _put(raw: dict[str, Any], keys: list[str], value: Any) -> None:
    """Write `value` at the path of `keys`."""
    container: Any = raw
    for depth, key in enumerate(keys[:-1]):
        inner = _get(container, key, keys[:depth])
        if inner is None:
            inner = {}
        elif depth == 0 and key in _NAMED_SECTIONS and not isinstance(inner, dict | list):
            inner = {"name": inner}
        _assign(container, key, inner, keys[:depth])
        container = inner
    _assign(container, keys[-1], value, keys[:-1])


def _get(container: Any, key: str, path: list[str]) -> Any:
    if isinstance(container, list):
        return container[_index(container, key, path)]
    return container.get(key) if isinstance(container, dict) else None


def _assign(container: Any, key: str, value: Any, path: list[str]) -> None:
    if isinstance(container, list):
        container[_index(container, key, path)] = value
    elif isinstance(container, dict):
        container[key] = value
    else:
        raise TypeError(f"{'.'.join(path)} is a single value, it has no {key!r}")


def _index(entries: list[Any], key: str, path: list[str]) -> int:
    if not key.isdecimal() or int(key) >= len(entries):
        last = len(entries) - 1
        raise LookupError(f"{'.'.join(path)} is a list: give an index from 0 to {last}")
    return int(key)
