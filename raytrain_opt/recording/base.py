"""What all records have in common: the version of the format, and no fields but their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1

# JSON has no infinity and no NaN: a float that is not finite is read back as None.
Number = float | None
Timings = dict[str, Number]


class RecordPart(BaseModel):
    """Base of every object in a record."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def from_values(cls, values: Mapping[str, object]) -> Self:
        """Return the object with those of the values that are its fields."""
        fields = cls.model_fields
        return cls.model_validate({name: v for name, v in values.items() if name in fields})


class Record(RecordPart):
    """Base of every record."""

    counted_by: ClassVar[str] = ""  # the field that is 1 in the first line of its file, 2, ...
    schema_version: int = Field(
        SCHEMA_VERSION, le=SCHEMA_VERSION, description="Version of the record format."
    )
