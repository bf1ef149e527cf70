"""The tables of all record files for docs/run-directory.md, generated from the models."""

from __future__ import annotations

from typing import Any

from raytrain_opt.recording.records import (
    BatchSizeProbeRecord,
    BatchSizeRecord,
    EpochRecord,
    Event,
    Phase,
    PredictionsRecord,
    Record,
    ResultRecord,
    RoundRecord,
    ScheduleRecord,
)

# Record files of a run directory, in the order in which a reader meets them.
RECORDS: tuple[type[Record], ...] = (
    EpochRecord,
    RoundRecord,
    Event,
    Phase,
    BatchSizeProbeRecord,
    BatchSizeRecord,
    ScheduleRecord,
    PredictionsRecord,
    ResultRecord,
)


def records_markdown() -> str:
    """Return a section per record file, and a section per object that occurs in them.

    Each section has a table of all fields with type and description.
    """
    sections: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    for model in RECORDS:
        schema = model.model_json_schema(mode="serialization")
        objects |= schema.get("$defs", {})
        sections.append(_section(f"`{model.file}`", schema))
    sections += [_section(name, schema, level=4) for name, schema in sorted(objects.items())]
    return "\n".join(sections)


def _section(title: str, schema: dict[str, Any], level: int = 3) -> str:
    text = schema.get("description", "").strip()
    rows = [
        f"| `{name}` | {_type(field)} | {_escape(field.get('description', ''))} |"
        for name, field in schema["properties"].items()
    ]
    table = "\n".join(["| field | type | meaning |", "|---|---|---|", *rows])
    return f"{'#' * level} {title}\n\n{text}\n\n{table}\n"


def _type(field: dict[str, Any]) -> str:
    """Return the type of a field as JSON has it."""
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in field:
        return " or ".join(_type(option) for option in field["anyOf"])
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if field.get("type") == "array":
        return f"list of {_type(field['items'])}"
    if field.get("type") == "object":
        values = field.get("additionalProperties")
        return f"object of {_type(values)}" if isinstance(values, dict) else "object"
    return str(field.get("type", "any"))


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
