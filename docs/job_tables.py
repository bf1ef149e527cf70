"""The tables of the job file for docs/job-file.md, generated from the models."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from raytrain_opt.config.schema import Job

_LIMITS = {
    "exclusiveMinimum": ">",
    "minimum": ">=",
    "exclusiveMaximum": "<",
    "maximum": "<=",
}


def job_markdown() -> str:
    """Return a table of all fields for the job, and for each of its sections."""
    definitions = Job.model_json_schema()["$defs"]
    lines = [*_table(Job, "", Job.model_json_schema()["properties"])]
    written: dict[type[BaseModel], str] = {}
    for name, field in Job.model_fields.items():
        lines += _sections(name, field, definitions, written)
    return "\n".join(lines).rstrip() + "\n"


def _sections(
    path: str,
    field: FieldInfo,
    definitions: dict[str, Any],
    written: dict[type[BaseModel], str],
    choice_above: str = "",
) -> Iterator[str]:
    """Yield the lines of the sections below a field, each class once, where it comes first."""
    sections = _sections_in(field.annotation)
    for model in sections:
        if model in written:
            continue
        choice = choice_above if path in written.values() else ""
        written[model] = path
        choice = _choice(model) if len(sections) > 1 else choice
        yield f"\n### `{path}`{choice}\n"
        yield f"{_escape(inspect.cleandoc(model.__doc__ or ''))}\n"
        yield from _table(model, f"{path}.", definitions[model.__name__]["properties"])
        for name, inner in model.model_fields.items():
            yield from _sections(f"{path}.{name}", inner, definitions, written, choice)


def _sections_in(kind: Any) -> list[type[BaseModel]]:
    """Return the sections that a type contains, such as those of a union."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [section for member in get_args(kind) for section in _sections_in(member)]


def _choice(model: type[BaseModel]) -> str:
    """Return the part of a heading that says which kind of section a model is."""
    for name, field in model.model_fields.items():
        if _selects_kind(field):
            return f" with `{name}: {' | '.join(map(str, get_args(field.annotation)))}`"
    return " with a function of your own"


def _table(model: type[BaseModel], prefix: str, properties: dict[str, Any]) -> Iterator[str]:
    """Yield a Markdown table with one row per field."""
    yield "| field | type | default | meaning |"
    yield "|---|---|---|---|"
    fields = sorted(model.model_fields.items(), key=lambda item: not _selects_kind(item[1]))
    for name, field in fields:
        selects = "Selects this kind of section." if _selects_kind(field) else ""
        cells = (
            f"`{prefix}{name}`",
            _type_text(properties[name]),
            _default_text(field),
            _escape(" ".join((field.description or selects).split())),
        )
        yield f"| {' | '.join(cells)} |"


def _selects_kind(field: FieldInfo) -> bool:
    return field.is_required() and get_origin(field.annotation) is Literal


def _escape(text: str) -> str:
    """Keep Markdown from reading columns and HTML tags in a description."""
    return text.replace("|", r"\|").replace("<", "&lt;")


def _type_text(schema: dict[str, Any]) -> str:
    """Return the type of a field as its JSON schema has it, with its limits."""
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if alternatives:
        return " or ".join(dict.fromkeys(_type_text(alternative) for alternative in alternatives))
    if "$ref" in schema:
        return "section"
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{value}`" for value in values)
    return _container_text(schema) or _scalar_text(schema)


def _container_text(schema: dict[str, Any]) -> str | None:
    if schema.get("type") == "array" and "prefixItems" in schema:
        return f"list of {len(schema['prefixItems'])}: {_type_text(schema['prefixItems'][0])}"
    if schema.get("type") == "array":
        return f"list of {_type_text(schema.get('items', {}))}"
    if schema.get("type") == "object":
        values = schema.get("additionalProperties")
        return f"mapping to {_type_text(values)}" if isinstance(values, dict) else "mapping"
    return None


def _scalar_text(schema: dict[str, Any]) -> str:
    names = {"string": "text", "boolean": "`true`, `false`", "null": "`null`", None: "any value"}
    name = names.get(schema.get("type"), schema.get("type", ""))
    limits = [f"{sign} {schema[key]:g}" for key, sign in _LIMITS.items() if key in schema]
    return " ".join([name, ", ".join(limits)]).strip()


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return ""
    if isinstance(value, BaseModel):
        explicit = value.model_dump(exclude_defaults=True)
        tag = next((f"`{key}: {text}`" for key, text in explicit.items() if key == "policy"), "")
        return tag or "see below"
    return f"`{json.dumps(value)}`" if not isinstance(value, str) else f"`{value}`"
