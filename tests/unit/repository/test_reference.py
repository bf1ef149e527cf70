"""The references of the job file and the records, generated from the models."""

from __future__ import annotations

import re

from pydantic import BaseModel

from docs.job_tables import job_markdown
from raytrain_opt.config.schema import Job
from raytrain_opt.config.section import Section
from raytrain_opt.recording.records import RecordPart


def _subclasses(model: type[BaseModel]) -> set[type[BaseModel]]:
    return {model}.union(*(_subclasses(child) for child in model.__subclasses__()))


def test_every_section_has_its_meaning() -> None:
    reference = job_markdown()
    sections = [
        model
        for model in _subclasses(Section)
        if model.__module__.startswith("raytrain_opt.config.") and not model.__subclasses__()
    ]
    assert len(sections) > 20
    for model in sections:
        first_line = str(model.__doc__).splitlines()[0].replace("<", "&lt;")
        assert model is Job or first_line in reference, model


def test_every_row_has_four_cells_and_a_meaning() -> None:
    rows = [line for line in job_markdown().splitlines() if line.startswith("| `")]
    cells = [re.split(r"(?<!\\) \| ", row.strip("| ")) for row in rows]
    assert {len(row) for row in cells} == {4}
    assert all(meaning for *_, meaning in cells)


def test_every_field_of_every_record_has_a_description() -> None:
    for model in _subclasses(RecordPart):
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"
