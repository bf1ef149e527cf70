"""Translate pydantic's errors into the words and paths of the job file.

pydantic names the alternatives of a union in its paths and reports one error for each of them;
here every field has one problem: the path as in YAML, which is where the input has the value, the
rule, the value and the nearest choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from raytrain_opt.config.data import DATA_NAMES
from raytrain_opt.config.section import BrokenRule, BrokenRulesError, is_bare_name
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

_ACCUMULATION = (
    "global_batch_size is the batch of an update; parallel: {micro_batches: N} computes "
    "it in N parts, workers.count x the steps of accumulation"
)
# Names that other tools have for what a job says in another way.
_ELSEWHERE = {
    "accumulate_grad_batches": _ACCUMULATION,
    "gradient_accumulation": _ACCUMULATION,
    "gradient_accumulation_steps": _ACCUMULATION,
    "warmup_steps": "write warmup: {steps: N} in learning_rate with policy: schedule",
}

# The error of a default that depends on a field with an error.
_NO_DEFAULT = "default_factory_not_called"


class _LocatedError(NamedTuple):
    """One pydantic error with its path in the YAML file.

    `union` is the path of the field of which this error rejects one alternative only.
    """

    error: ErrorDetails
    path: tuple[str | int, ...]
    union: tuple[str | int, ...] | None


def problems_of(error: ValidationError, job: type[BaseModel], values: object) -> list[Problem]:
    """Return one problem for each wrong field of `values`, in the order of the schema.

    An error inside an alternative of a union shows that this one was meant: what the others of the
    field say does not count.
    """
    errors = (e for e in error.errors(include_url=False) if e["type"] != _NO_DEFAULT)
    located = [_locate(details, values) for details in errors]
    meant = {e.union for e in located if e.path != e.union}
    groups: dict[tuple[str | int, ...], list[_LocatedError]] = {}
    for entry in located:
        if entry.path != entry.union or entry.path not in meant:
            groups.setdefault(entry.path, []).append(entry)
    return [problem for group in groups.values() for problem in _problems(group, job)]


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


def _problems(group: list[_LocatedError], job: type[BaseModel]) -> list[Problem]:
    """Return one problem, or several for a section that breaks several of its rules."""
    located = group[0]
    kind, value = located.error["type"], located.error["input"]
    context = located.error.get("ctx", {})
    broken, path = context.get("error"), _dotted(located.path)
    if isinstance(broken, BrokenRulesError):
        return [_broken_rule(located, rule) for rule in broken.rules]
    if kind == "missing":
        return [Problem(path, "is required")]
    if kind == "extra_forbidden":
        *above, key = located.error["loc"]
        valid = [name for section in _sections_at(job, above) for name in section.model_fields]
        names = f"valid here: {', '.join(dict.fromkeys(valid))}"
        shown_hint = _ELSEWHERE.get(str(key)) or nearest(key, valid) or names
        return [Problem(path, "is not a known key", shown(value), shown_hint)]
    if kind.startswith("union_tag_"):
        return [_wrong_tag(located, path, job)]
    if kind == "value_error":
        return [Problem(path, str(broken or located.error["msg"]), shown(value))]
    if kind == "invalid_key" or located.error["loc"][-1] == "[key]":
        return [Problem(path, "its key must be text", shown(located.path[-1]))]
    choices = [choice for e in group for choice in _choices(e.error)]
    hint = nearest(value, choices) if isinstance(value, str) else None
    return [Problem(path, _rule(group), shown(value), hint)]


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


def _wrong_tag(located: _LocatedError, path: str, job: type[BaseModel]) -> Problem:
    """Report a wrong or missing key that selects the kind of section (`policy`, `data.name`)."""
    section, key = located.error["input"], located.error["ctx"]["discriminator"].strip("'")
    sections = _sections_at(job, located.error["loc"])
    choices = [tag for section_kind in sections for tag in _tags_of(section_kind)]
    rule = f"one of {', '.join(choices)}"
    if path == "data":
        key, choices = "name", list(DATA_NAMES)
        rule = f"one of {', '.join(choices)} or package.module:function"
    if isinstance(section, dict) and key not in section:
        return Problem(f"{path}.{key}", "is required", None, rule)
    value = section[key] if isinstance(section, dict) else section
    return Problem(f"{path}.{key}", f"must be {rule}", shown(value), nearest(value, choices))


def _broken_rule(located: _LocatedError, rule: BrokenRule) -> Problem:
    below, text = rule
    path = _dotted((*located.path, below))
    return Problem(path, text, _value_text(located.error["input"], below))


def _value_text(value: Any, path: str) -> str | None:
    """Return the value at `path` as the user gave it; None for a default or a bare name."""
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return shown(value)


def _dotted(path: Iterable[str | int]) -> str:
    return ".".join(map(str, path))


def _locate(error: ErrorDetails, value: Any) -> _LocatedError:
    """Follow pydantic's location through the input; what is not there names an alternative."""
    location = error["loc"]
    # What follows a key that the input need not have.
    of_key = () if error["type"] in ("missing", "extra_forbidden", "invalid_key") else ("[key]",)
    path: tuple[str | int, ...] = ()
    union: tuple[str | int, ...] | None = None
    for i, part in enumerate(location, 1):
        is_there = _has(value, part)
        if is_there or location[i:] == of_key:
            path = (*path, part)
            value = value[part] if is_there and not is_bare_name(value) else None
        elif part != "[key]":
            union = path
    return _LocatedError(error, path, union)


def _has(value: Any, part: str | int) -> bool:
    if isinstance(value, list | tuple):
        return isinstance(part, int) and part < len(value)
    return part in value if isinstance(value, Mapping) else part == "name" and is_bare_name(value)


def _sections_at(job: type[BaseModel], location: Iterable[str | int]) -> list[type[BaseModel]]:
    """Return the kinds of section that may stand at a location of pydantic's."""
    sections = [job]
    for part in location:
        fields = [field for s in sections if (field := s.model_fields.get(str(part)))]
        below = [section for field in fields for section in sections_in(field.annotation)]
        chosen = [s for s in sections if part in (s.__name__, *_tags_of(s))]
        sections = below or chosen or sections
    return sections


def sections_in(kind: Any) -> list[type[BaseModel]]:
    """Return the sections that a type contains, such as those of a union."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [section for member in get_args(kind) for section in sections_in(member)]


def _tags_of(section: type[BaseModel]) -> list[str]:
    """Return the values of the key that selects a kind of section."""
    kinds = (field.annotation for field in section.model_fields.values() if field.is_required())
    return [tag for kind in kinds if get_origin(kind) is Literal for tag in get_args(kind)]
