"""The generated reference covers every field of every record."""

from __future__ import annotations

from pydantic import BaseModel

from raytrain_opt.recording.records import RecordPart


def subclasses(model: type[BaseModel]) -> set[type[BaseModel]]:
    return {model}.union(*map(subclasses, model.__subclasses__()))


def test_every_field_of_every_record_has_a_description() -> None:
    for model in subclasses(RecordPart):
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"
