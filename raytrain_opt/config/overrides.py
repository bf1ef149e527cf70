"""`--set a.b=c`: values from the command line laid over a job file before it is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raytrain_opt.config.messages import shown
from raytrain_opt.config.strict_yaml import MAX_DEPTH, read_yaml
from raytrain_opt.errors import JobError, Problem

# These may stand in a job file as a bare name: `model: resnet8`.
_NAMED_SECTIONS = ("model", "data", "optimizer", "loss")


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> list[Problem]:
    """Write each `path=value` into `raw`, in order; return what is wrong with them.

    The value is YAML. The path goes through lists by index and makes the sections that are
    missing; whether its keys exist is for the schema to say.
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
    holder: Any = raw
    for depth, key in enumerate(keys[:-1]):
        inner = _get(holder, key, keys[:depth])
        if inner is None:
            inner = {}
        elif depth == 0 and key in _NAMED_SECTIONS and not isinstance(inner, dict | list):
            inner = {"name": inner}
        _assign(holder, key, inner, keys[:depth])
        holder = inner
    _assign(holder, keys[-1], value, keys[:-1])


def _get(holder: Any, key: str, above: list[str]) -> Any:
    if isinstance(holder, list):
        return holder[_index(holder, key, above)]
    return holder.get(key) if isinstance(holder, dict) else None


def _assign(holder: Any, key: str, value: Any, above: list[str]) -> None:
    if isinstance(holder, list):
        holder[_index(holder, key, above)] = value
    elif isinstance(holder, dict):
        holder[key] = value
    else:
        raise TypeError(f"{'.'.join(above)} is a single value, it has no {key!r}")


def _index(holder: list[Any], key: str, above: list[str]) -> int:
    if not key.isdecimal() or int(key) >= len(holder):
        last = len(holder) - 1
        raise LookupError(f"{'.'.join(above)} is a list: give an index from 0 to {last}")
    return int(key)
