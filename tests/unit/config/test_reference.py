"""The reference of the job file, generated from the models."""

from __future__ import annotations

import re

from pydantic import BaseModel

from docs.job_tables import job_markdown
from raytrain_opt.config.schema import Job
from raytrain_opt.config.section import Section


def _subclasses(model: type[BaseModel]) -> set[type[BaseModel]]:
    return {model}.union(*(_subclasses(child) for child in model.__subclasses__()))


def test_every_field_of_the_job_has_a_row_with_its_default() -> None:
    reference = job_markdown()
    for name, field in Job.model_fields.items():
        assert f"| `{name}` |" in reference
        assert " ".join(str(field.description).split()).split("<")[0] in reference
    assert "| `global_batch_size` | integer > 0 | required |" in reference
    assert "| `precision` | `auto`, `fp32`, `fp32_strict`, `bf16`, `fp16` | `auto` |" in reference
    assert "| `data.shuffle_shards` | integer > 0 | `16` |" in reference


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


def test_a_kind_of_section_is_named_by_the_key_that_selects_it() -> None:
    headings = re.findall("^### (.*)$", job_markdown(), re.MULTILINE)
    assert "`learning_rate` with `policy: stpt`" in headings
    assert "`data` with a function of your own" in headings
    assert len(set(headings)) == len(headings)


def test_every_row_has_four_cells_and_a_meaning() -> None:
    rows = [line for line in job_markdown().splitlines() if line.startswith("| `")]
    cells = [re.split(r"(?<!\\) \| ", row.strip("| ")) for row in rows]
    assert {len(row) for row in cells} == {4}
    assert all(meaning for *_, meaning in cells)
