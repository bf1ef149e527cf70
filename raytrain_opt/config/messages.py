"""What pydantic found wrong with a job, told in the words and paths of the job file.

pydantic names union members in its paths and reports one error for each of them; here every
field has one problem, with the path as in YAML, the rule, the value and the nearest choice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError
from pydantic_core import ErrorDetails

from raytrain_opt.config.schema import Job
from raytrain_opt.config.section import BrokenRule, BrokenRulesError
from raytrain_opt.errors import Problem

MAX_VALUE_CHARACTERS = 80

# pydantic's error types; what follows "must be". {} fields come from the error's context.
_MUST_BE = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "int_from_float": "a whole number",
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
    "model_attributes_type": "a section (keys and values) with the key policy",
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
class _Finding:
    """One pydantic error with its place in the YAML file.

    `union` is the path of the field of which this error rejects only one alternative;
    `section` the model that holds the last key of the path.
    """

    error: ErrorDetails
    path: tuple[str | int, ...]
    union: tuple[str | int, ...] | None
    section: type[BaseModel] | None


def problems_of(error: ValidationError) -> list[Problem]:
    """One problem for each wrong field, in the order of the schema."""
    groups: dict[tuple[str | int, ...], list[_Finding]] = {}
    for details in error.errors(include_url=False):
        finding = _locate(details)
        place = finding.path if finding.union is None else finding.union
        groups.setdefault(place, []).append(finding)
    return [problem for group in groups.values() for problem in _of_field(group)]


def nearest(value: object, choices: list[str]) -> str | None:
    """`did you mean …?`, or None when no choice is near."""
    near = get_close_matches(str(value), choices, n=1)
    return f"did you mean {near[0]!r}?" if near else None


def shown(value: object) -> str:
    """repr of a value, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[: MAX_VALUE_CHARACTERS - 1] + "…"


def _of_field(group: list[_Finding]) -> list[Problem]:
    """Alternatives of a union become one rule; an error deep inside one shows which was meant."""
    inside = [f for f in group if f.union is None or len(f.path) > len(f.union)]
    return [p for finding in inside for p in _problems([finding])] or _problems(group)


def _problems(group: list[_Finding]) -> list[Problem]:
    """One, but for a section that breaks several of its rules."""
    broken = group[0].error.get("ctx", {}).get("error")
    if isinstance(broken, BrokenRulesError):
        return [_broken_rule(group[0], rule) for rule in broken.rules]
    return [_problem(group)]


def _problem(group: list[_Finding]) -> Problem:
    finding = group[0]
    kind, given = finding.error["type"], finding.error["input"]
    path = ".".join(str(part) for part in finding.path)
    if kind == "missing":
        return Problem(path, "is required")
    if kind == "extra_forbidden":
        return _unknown_key(finding, path)
    if kind.startswith("union_tag_"):
        return _wrong_tag(finding, path)
    if kind == "value_error":
        text = str(finding.error.get("ctx", {}).get("error", finding.error["msg"]))
        return Problem(path, text, shown(given))
    if kind == "invalid_key" or finding.error["loc"][-1] == "[key]":
        return Problem(path, "its key must be text", shown(finding.path[-1]))
    choices = [choice for f in group for choice in _choices(f.error)]
    hint = nearest(given, choices) if isinstance(given, str) else None
    return Problem(path, _rule(group), shown(given), hint)


def _rule(group: list[_Finding]) -> str:
    texts = dict.fromkeys(_must_be(finding.error) for finding in group)
    if "a number" in texts:
        texts.pop("a whole number", None)
    return f"must be {' or '.join(texts)}"


def _must_be(error: ErrorDetails) -> str:
    context = error.get("ctx", {})
    if error["type"] == "literal_error":
        choices = _choices(error)
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    pattern = _MUST_BE.get(error["type"])
    return pattern.format(**context) if pattern else f"valid: {error['msg']}"


def _choices(error: ErrorDetails) -> list[str]:
    context = error.get("ctx", {})
    return re.findall(r"'([^']*)'", context.get("expected_tags", context.get("expected", "")))


def _unknown_key(finding: _Finding, path: str) -> Problem:
    valid = list(finding.section.model_fields) if finding.section else []
    hint = nearest(finding.path[-1], valid) or f"valid here: {', '.join(valid)}"
    return Problem(path, "is not a known key", shown(finding.error["input"]), hint)


def _wrong_tag(finding: _Finding, path: str) -> Problem:
    """The key that says which kind of section it is (`policy`) is wrong or missing."""
    context = finding.error.get("ctx", {})
    key = context["discriminator"].strip("'")
    if finding.error["type"] == "union_tag_not_found":
        return Problem(f"{path}.{key}", "is required", None, f"one of {', '.join(_tags(finding))}")
    choices = _choices(finding.error)
    hint = nearest(context["tag"], choices)
    rule = f"must be one of {', '.join(choices)}"
    return Problem(f"{path}.{key}", rule, shown(finding.error["input"][key]), hint)


def _broken_rule(finding: _Finding, rule: BrokenRule) -> Problem:
    below, text = rule
    path = ".".join(str(part) for part in (*finding.path, below))
    return Problem(path, text, _shown_at(finding.error["input"], below))


def _shown_at(value: Any, path: str) -> str | None:
    """The value at `path` as the user gave it; None for a default or a bare name."""
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return shown(value)


def _locate(error: ErrorDetails) -> _Finding:
    """Walk the schema along pydantic's location: drop what names alternatives, keep keys."""
    kind: Any = Job
    path: tuple[str | int, ...] = ()
    union: tuple[str | int, ...] | None = None
    section: type[BaseModel] | None = None
    for part in error["loc"]:
        alternatives = _alternatives(kind)
        if len(alternatives) > 1:
            kind, tagged = _alternative(alternatives, part)
            union = union if tagged or union is not None else path
        elif part != "[key]":
            section = alternatives[0] if _is_section(alternatives[0]) else None
            kind = _inside(alternatives[0], part)
            path = (*path, part)
    return _Finding(error, path, union, section)


def _tags(finding: _Finding) -> list[str]:
    kind: Any = Job
    for part in finding.path:
        kind = _inside(kind, part)
    return [tag for alternative in _alternatives(kind) for tag in _tags_of(alternative)]


def _alternatives(kind: Any) -> list[Any]:
    """The members of a union, without None; any other type alone."""
    if get_origin(kind) is Annotated and not any(isinstance(m, Tag) for m in kind.__metadata__):
        return _alternatives(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        members = [member for member in get_args(kind) if member is not NoneType]
        return members if len(members) > 1 else _alternatives(members[0])
    return [_bare(kind)] if kind is not None else [Any]


def _alternative(members: list[Any], label: str | int) -> tuple[Any, bool]:
    """The member that pydantic calls `label`, and whether a key of the file chose it."""
    for member in members:
        if label in _tags_of(member):
            return _bare(member), True
    for member in members:
        origin = get_origin(_bare(member))
        if isinstance(origin, type) and str(label).startswith(f"{origin.__name__}["):
            return _bare(member), False
    return Any, False


def _tags_of(member: Any) -> list[str]:
    if get_origin(member) is Annotated:
        return [m.tag for m in member.__metadata__ if isinstance(m, Tag)]
    if not _is_section(member):
        return []
    kinds = (field.annotation for field in member.model_fields.values() if field.is_required())
    return [tag for kind in kinds if get_origin(kind) is Literal for tag in get_args(kind)][:1]


def _bare(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _inside(kind: Any, part: str | int) -> Any:
    """The type of what stands under key or index `part`; Any where the schema ends."""
    if _is_section(kind):
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
