"""Translate pydantic's errors into the words and paths of the job file.

pydantic names the alternatives of a union in its paths and reports one error for each of them;
here every field has one problem: the path as in YAML, the rule, the value and the nearest choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError
from pydantic_core import ErrorDetails

from raytrain_opt.config.data import DATA_NAMES
from raytrain_opt.config.section import BrokenRule, BrokenRulesError
from raytrain_opt.errors import Problem

MAX_VALUE_CHARACTERS = 80

# pydantic's error types, and what follows "must be"; {} come from the context of the error.
_MUST_BE = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_parsing_size": "an integer of fewer digits",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "callable_type": "a function",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a section (keys and values)",
    "model_type": "a section (keys and values)",
    "model_attributes_type": "a section (keys and values) with the key {key}",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "too_short": "a list of at least {min_length} entries",
    "too_long": "a list of at most {max_length} entries",
    "string_too_long": "at most {max_length} characters long",
    "string_pattern_mismatch": "text of the form {pattern}",
}


@dataclass(frozen=True)
class _LocatedError:
    """One pydantic error with its path in the YAML file.

    `union` is the path of a field of which this error rejects one alternative only; `section` the
    model that holds the last key of the path; `kind` the type of its value.
    """

    error: ErrorDetails
    path: tuple[str | int, ...]
    union: tuple[str | int, ...] | None
    section: type[BaseModel] | None
    kind: Any


def problems_of(error: ValidationError, job: type[BaseModel]) -> list[Problem]:
    """Return one problem for each wrong field, in the order of the schema."""
    groups: dict[tuple[str | int, ...], list[_LocatedError]] = {}
    for details in error.errors(include_url=False):
        if details["type"] == "default_factory_not_called":
            continue  # a default that depends on a field with an error
        located = _locate(details, job)
        path = located.path if located.union is None else located.union
        groups.setdefault(path, []).append(located)
    return [problem for group in groups.values() for problem in _field_problems(group)]


def nearest(
    value: object,
    choices: Iterable[str],
    n: int = 1,
    cutoff: float = 0.6,
    *,
    ignore_case: bool = False,
) -> str | None:
    """Return `did you mean 'a' or 'b'?` with at most `n` choices; None if no choice is near.

    `cutoff` is the least similarity, as in `difflib.get_close_matches`.
    """
    text = str(value).lower() if ignore_case else str(value)
    names = {choice.lower() if ignore_case else choice: choice for choice in choices}
    matches = [names[match] for match in get_close_matches(text, names, n, cutoff)]
    return f"did you mean {' or '.join(map(repr, matches))}?" if matches else None


def shown(value: object) -> str:
    """Return the repr of a value, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[: MAX_VALUE_CHARACTERS - 1] + "…"


def _field_problems(group: list[_LocatedError]) -> list[Problem]:
    """Merge the alternatives of a union into one rule.

    An error inside an alternative shows that this one was meant: it is reported alone.
    """
    inside = [e for e in group if e.union is None or len(e.path) > len(e.union)]
    return [p for located in inside for p in _problems([located])] or _problems(group)


def _problems(group: list[_LocatedError]) -> list[Problem]:
    """Return one problem, or several for a section that breaks several of its rules."""
    broken = group[0].error.get("ctx", {}).get("error")
    if isinstance(broken, BrokenRulesError):
        return [_broken_rule(group[0], rule) for rule in broken.rules]
    return [_problem(group)]


def _problem(group: list[_LocatedError]) -> Problem:
    located = group[0]
    kind, value = located.error["type"], located.error["input"]
    path = ".".join(str(part) for part in located.path)
    if kind == "missing":
        return Problem(path, "is required")
    if kind == "extra_forbidden":
        return _unknown_key(located, path)
    if kind.startswith("union_tag_"):
        return _wrong_tag(located, path)
    if kind == "value_error":
        text = str(located.error.get("ctx", {}).get("error", located.error["msg"]))
        return Problem(path, text, shown(value))
    if kind == "invalid_key" or located.error["loc"][-1] == "[key]":
        return Problem(path, "its key must be text", shown(located.path[-1]))
    choices = [choice for e in group for choice in _choices(e.error)]
    hint = nearest(value, choices) if isinstance(value, str) else None
    return Problem(path, _rule(group), shown(value), hint)


def _rule(group: list[_LocatedError]) -> str:
    texts = dict.fromkeys(_requirement(located) for located in group)
    if "a number" in texts:
        texts.pop(_MUST_BE["int_type"], None)
    return f"must be {' or '.join(texts)}"


def _requirement(located: _LocatedError) -> str:
    """Return what follows "must be"."""
    error, key = located.error, "strategy" if "batch_size_search" in located.path else "policy"
    context = {"key": key, **error.get("ctx", {})}
    if error["type"] == "literal_error":
        choices = _choices(error)
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    pattern = _MUST_BE.get(error["type"])
    return pattern.format(**context) if pattern else f"valid: {error['msg']}"


def _choices(error: ErrorDetails) -> list[str]:
    context = error.get("ctx", {})
    return re.findall(r"'([^']*)'", context.get("expected_tags", context.get("expected", "")))


def _unknown_key(located: _LocatedError, path: str) -> Problem:
    valid = list(located.section.model_fields) if located.section else []
    hint = nearest(located.path[-1], valid) or f"valid here: {', '.join(valid)}"
    return Problem(path, "is not a known key", shown(located.error["input"]), hint)


def _wrong_tag(located: _LocatedError, path: str) -> Problem:
    """Report a wrong or missing key that selects the kind of section (`policy`, `data.name`)."""
    section, key = located.error["input"], located.error["ctx"]["discriminator"].strip("'")
    choices = [tag for member in union_members(located.kind) for tag in _tags_of(member)]
    rule = f"one of {', '.join(choices)}"
    if path == "data":
        key, choices = "name", list(DATA_NAMES)
        rule = f"one of {', '.join(choices)} or package.module:function"
        if isinstance(section, tuple):
            rule = "a name, or a function that returns the two Datasets (train, test)"
    if isinstance(section, dict) and key not in section:
        return Problem(f"{path}.{key}", "is required", None, rule)
    value = section[key] if isinstance(section, dict) else section
    return Problem(f"{path}.{key}", f"must be {rule}", shown(value), nearest(value, choices))


def _broken_rule(located: _LocatedError, rule: BrokenRule) -> Problem:
    below, text = rule
    path = ".".join(str(part) for part in (*located.path, below))
    return Problem(path, text, _value_text(located.error["input"], below))


def _value_text(value: Any, path: str) -> str | None:
    """Return the value at `path` as the user gave it; None for a default or a bare name."""
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return shown(value)


def _locate(error: ErrorDetails, job: type[BaseModel]) -> _LocatedError:
    """Walk the schema along pydantic's location; keep keys, drop the names of alternatives."""
    kind: Any = job
    path: tuple[str | int, ...] = ()
    union: tuple[str | int, ...] | None = None
    section: type[BaseModel] | None = None
    for part in error["loc"]:
        alternatives = union_members(kind)
        if len(alternatives) > 1:
            kind, tagged = _find_alternative(alternatives, part)
            union = union if tagged or union is not None else path
        elif part != "[key]":
            section = alternatives[0] if is_section(alternatives[0]) else None
            kind = _child_kind(alternatives[0], part)
            path = (*path, part)
    return _LocatedError(error, path, union, section, kind)


def union_members(kind: Any) -> list[Any]:
    """Return the members of a union without None; any other type alone."""
    if get_origin(kind) is Annotated and not any(isinstance(m, Tag) for m in kind.__metadata__):
        return union_members(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        members = [member for member in get_args(kind) if member is not NoneType]
        return members if len(members) > 1 else union_members(members[0])
    return [without_annotation(kind)] if kind is not None else [Any]


def _find_alternative(members: list[Any], label: str | int) -> tuple[Any, bool]:
    """Return the member that pydantic calls `label`, and whether a key of the file chose it."""
    for member in members:
        if label in _tags_of(member):
            return without_annotation(member), True
    for member in members:
        kind = without_annotation(member)
        words = re.findall(r"\w+", str(label))  # of list[...] or function-after[..., CountRange]
        if is_section(kind):
            matches = kind.__name__ in words
        else:
            matches = getattr(get_origin(kind), "__name__", None) in words[:1]
        if matches:
            return kind, False
    return Any, False


def _tags_of(member: Any) -> list[str]:
    if get_origin(member) is Annotated:
        return [m.tag for m in member.__metadata__ if isinstance(m, Tag)]
    if not is_section(member):
        return []
    kinds = (field.annotation for field in member.model_fields.values() if field.is_required())
    return [tag for kind in kinds if get_origin(kind) is Literal for tag in get_args(kind)][:1]


def without_annotation(kind: Any) -> Any:
    """Return the type inside `Annotated`; any other type as it is."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def is_section(kind: Any) -> bool:
    """Return whether a type is a section of the job file."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _child_kind(kind: Any, part: str | int) -> Any:
    """Return the type of the value under key or index `part`; Any where the schema ends."""
    if is_section(kind):
        field = kind.model_fields.get(str(part))
        return field.annotation if field else Any
    arguments = get_args(kind)
    if get_origin(kind) is dict:
        return arguments[1]
    if get_origin(kind) is list:
        return arguments[0]
    if get_origin(kind) is tuple and isinstance(part, int) and part < len(arguments):
        return arguments[part]
    return Any
