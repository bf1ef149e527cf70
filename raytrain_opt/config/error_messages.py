"""Translate pydantic's errors into the words and paths of the job file.

pydantic names the alternatives of a union in its paths and reports one error for each of them;
here every field has one problem: path as in YAML, rule, value and nearest choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from raytrain_opt.errors import Problem

MAX_VALUE_CHARACTERS = 80

_SECTION = "a section (keys and values)"


class SectionError(ValueError):
    """Everything that is wrong in a section; the paths begin below it."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return "; ".join(map(str, self.problems))


class _Located(NamedTuple):
    """One error: its path in the section, and the path of a union whose alternative it rejects."""

    path: str
    union: str | None
    error: ErrorDetails | Problem


def problems_of(error: ValidationError, section: type[BaseModel], values: object) -> list[Problem]:
    """Return one problem for each wrong field of a section, in the order of the schema.

    An error inside an alternative of a union shows that this one was meant: what the others of the
    field say does not count.
    """
    located = [entry for details in error.errors() for entry in _locate(details, values)]
    meant = {entry.union for entry in located if entry.path != entry.union}
    groups: dict[str, list[ErrorDetails | Problem]] = {}
    for entry in located:
        if entry.path != entry.union or entry.path not in meant:
            groups.setdefault(entry.path, []).append(entry.error)
    problems: list[Problem] = []
    for path, group in groups.items():
        translated = [e for e in group if isinstance(e, Problem)]
        if plain := [e for e in group if isinstance(e, dict)]:
            problem = _problem(path, plain, section)
            or_section = f" or {_SECTION}" if translated else ""
            problems.append(replace(problem, rule=problem.rule + or_section))
        else:
            problems += [replace(problem, path=path) for problem in translated]
    return problems


def given(value: Any, path: str) -> str | None:
    """Return the value at a path of a section as the user gave it; None for a default."""
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return shown(value)


def nearest(value: object, choices: Iterable[str], n: int = 1) -> str | None:
    """Return `did you mean 'a' or 'b'?` with at most `n` choices; None if no choice is near."""
    names = {choice.lower(): choice for choice in choices}
    matches = [names[match] for match in get_close_matches(str(value).lower(), names, n)]
    return f"did you mean {' or '.join(map(repr, matches))}?" if matches else None


def shown(value: object) -> str:
    """Return the repr of a value, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[: MAX_VALUE_CHARACTERS - 1] + "…"


def _locate(error: ErrorDetails, value: Any) -> Iterator[_Located]:
    """Follow pydantic's location through the input; what is not there names an alternative."""
    kind, location, inner = error["type"], error["loc"], error.get("ctx", {}).get("error")
    if kind == "default_factory_not_called":  # it depends on a field with an error
        return
    parts, union = list[str](), None
    for i, part in enumerate(location, 1):
        is_there = isinstance(value, Mapping) and part in value
        if isinstance(value, list | tuple):
            is_there = isinstance(part, int) and part < len(value)
        if is_there or (kind == "missing" and i == len(location)):
            parts.append(str(part))
            value = value[part] if is_there else None
        elif part != "[key]":
            union = ".".join(parts)
    problems = inner.problems if isinstance(inner, SectionError) else [error]
    for problem in problems:
        below = [problem.path] if isinstance(problem, Problem) and problem.path else []
        yield _Located(".".join([*parts, *below]), union, problem)


def _problem(path: str, group: list[ErrorDetails], section: type[BaseModel]) -> Problem:
    details = next((e for e in group if e["type"] == "value_error"), group[0])
    context = details.get("ctx", {})
    kind, value = details["type"], details["input"]
    if kind == "missing":
        return Problem(path, "is required")
    if kind == "extra_forbidden":
        names = list(section.model_fields)
        valid = nearest(path, names) or f"valid here: {', '.join(names)}"
        return Problem(path, "is not a known key", shown(value), valid)
    if kind.startswith("union_tag_"):
        return _wrong_tag(path, details, section)
    if kind == "value_error":
        return Problem(path, str(context.get("error", details["msg"])), shown(value))
    if kind == "invalid_key" or "[key]" in details["loc"]:
        return Problem(path, "its key must be text")
    choices = [choice for details in group for choice in _choices(details)]
    texts = dict.fromkeys(map(_requirement, group))
    if "a valid number" in texts:
        texts.pop("a valid integer", None)
    hint = nearest(value, choices) if isinstance(value, str) else None
    other = [text for text in texts if " should " in text or text.startswith("Unable")]
    rule = other[0][0].lower() + other[0][1:] if other else f"must be {' or '.join(texts)}"
    return Problem(path, rule, shown(value), hint)


def _requirement(error: ErrorDetails) -> str:
    """Return what follows "must be"."""
    message = error["msg"].removeprefix("Input should be ")
    text = re.sub(r" or (an )?instance of \w+| or object to .*|, (unable|got) .*", "", message)
    is_section = error["type"] == "model_attributes_type" or text == "a valid dictionary"
    return _SECTION if is_section else text


def _choices(error: ErrorDetails) -> list[str]:
    context = error.get("ctx", {})
    return re.findall(r"'([^']*)'", context.get("expected_tags", context.get("expected", "")))


def _wrong_tag(path: str, error: ErrorDetails, section: type[BaseModel]) -> Problem:
    """Report a wrong or missing key that selects the kind of section (`policy`, `data.name`)."""
    value, key = error["input"], error["ctx"]["discriminator"].strip("'")
    kinds = sections_in(section.model_fields[path].annotation)
    choices = _choices(error) or [tag for kind in kinds for tag in _tags_of(kind)]
    rule = f"one of {', '.join(choices)}"
    if isinstance(value, dict) and key not in value:
        return Problem(f"{path}.{key}", "is required", None, rule)
    value = value[key] if isinstance(value, dict) else value
    return Problem(f"{path}.{key}", f"must be {rule}", shown(value), nearest(value, choices))


def sections_in(kind: Any) -> list[type[BaseModel]]:
    """Return the sections that a type contains, such as the members of a union."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [section for member in get_args(kind) for section in sections_in(member)]


def _tags_of(section: type[BaseModel]) -> list[str]:
    """Return the values of the key that selects a kind of section."""
    kinds = (field.annotation for field in section.model_fields.values() if field.is_required())
    return [tag for kind in kinds if get_origin(kind) is Literal for tag in get_args(kind)]
