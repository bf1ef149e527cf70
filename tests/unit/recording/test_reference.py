"""The generated reference covers every field of every record."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from docs.record_tables import RECORDS, records_markdown
from raytrain_opt.recording.records import RecordPart
from raytrain_opt.search.noise_scale import NoiseScale


def subclasses(model: type[BaseModel]) -> set[type[BaseModel]]:
    return {model}.union(*map(subclasses, model.__subclasses__()))


def test_every_field_of_every_record_has_a_description() -> None:
    for model in subclasses(RecordPart):
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"


@pytest.mark.parametrize("file", RECORDS)
def test_every_file_has_a_table_of_its_fields(file: str) -> None:
    section = records_markdown().split(f"### `{file}`", 1)[1].split("\n### ", 1)[0]
    for name in RECORDS[file].model_fields:
        assert f"| `{name}` |" in section


def test_computed_values_and_parts_are_documented() -> None:
    text = records_markdown()
    section = text.split(f"#### {NoiseScale.__name__}\n", 1)[1]
    assert "| `value` | number |" in section
    assert "list of [CandidateRecord](#candidaterecord)" in text
    assert r"\|G\|^2" in section
