"""From a job file to a `Job` and back. Everything wrong with the file is reported at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from raytrain_opt.config.messages import nearest, problems_of, shown
from raytrain_opt.config.overrides import apply_overrides
from raytrain_opt.config.schema import ARRAY_SETS, Job
from raytrain_opt.config.section import function_name
from raytrain_opt.config.strict_yaml import read_yaml, write_yaml
from raytrain_opt.errors import JobError, Problem

MAX_BYTES = 2**20
_DATA_NAMES = (*ARRAY_SETS, "arrays", "image_folder")


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """The job written in a YAML file, with each `a.b=c` of `overrides` laid over it.

    Raises JobError with every problem: file, YAML syntax, overrides, schema.
    """
    return parse_job(_read_text(Path(path)), source=str(path), overrides=overrides)


def parse_job(
    job: Mapping[str, Any] | str, source: str = "job", overrides: Sequence[str] = ()
) -> Job:
    """The job given as YAML text or as the mapping it would hold; `source` names it in errors.

    Raises JobError with every problem.
    """
    raw = _copied(read_yaml(job, source) if isinstance(job, str) else job)
    if not isinstance(raw, dict):
        rule = "is empty" if raw is None else "must be keys and values"
        given = None if raw is None else shown(raw)
        hint = "a job needs at least model, data, epochs and global_batch_size"
        raise JobError([Problem("the file", rule, given, hint)], source)
    problems = apply_overrides(raw, overrides)
    result = _validated(raw)
    if isinstance(result, Job) and not problems:
        return result
    raise JobError(problems + (result if isinstance(result, list) else []), source)


def dump_job(job: Job) -> str:
    """The job with every default filled in, as YAML that `parse_job` reads back equal.

    A function given from Python stands there as module:qualname. Raises JobError when an
    argument is nothing that YAML can hold.
    """
    return write_yaml(plain_job(job))


def plain_job(job: Job) -> dict[str, Any]:
    """The same as mappings, lists and scalars. Raises JobError like `dump_job`."""
    return {key: _plain(value, key) for key, value in job.model_dump().items()}


def job_schema() -> dict[str, Any]:
    """The JSON schema of a job file, for editors and other programs."""
    schema = Job.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            rule = f"is larger than {MAX_BYTES // 2**20} MiB; a job file is a page of text"
            raise JobError([Problem("the file", rule)], str(path))
        return content.decode("utf-8-sig")
    except FileNotFoundError as error:
        beside = [found.name for found in path.parent.glob("*.y*ml")]
        problem = Problem("the file", "does not exist", None, nearest(path.name, beside))
        raise JobError([problem], str(path)) from error
    except UnicodeDecodeError as error:
        rule = f"is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
        raise JobError([Problem("the file", rule)], str(path)) from error
    except (OSError, ValueError) as error:
        rule = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise JobError([Problem("the file", rule)], str(path)) from error


def _validated(raw: dict[str, Any]) -> Job | list[Problem]:
    name_problem = _unknown_data(raw.get("data"))
    try:
        job = Job.model_validate(raw)
    except ValidationError as error:
        problems = problems_of(error)
        if name_problem is None:
            return problems
        # Without a known name nobody can tell which keys the section may have.
        elsewhere = [p for p in problems if p.path.split(".")[0] != "data"]
        return [*elsewhere, name_problem]
    if name_problem is not None:
        return [name_problem]
    return _booleans_as_numbers(raw, job.model_dump(), "") or job


def _unknown_data(section: Any) -> Problem | None:
    """The schema takes any text for the name of the user's own data set; only a name with a
    colon can be one."""
    if isinstance(section, dict) and "name" not in section:
        hint = f"one of {', '.join(_DATA_NAMES)} or package.module:function"
        return Problem("data.name", "is required", None, hint)
    name = section.get("name") if isinstance(section, dict) else section
    if not isinstance(name, str) or name in _DATA_NAMES or ":" in name:
        return None
    rule = f"must be one of {', '.join(_DATA_NAMES)} or package.module:function"
    return Problem("data.name", rule, shown(name), nearest(name, list(_DATA_NAMES)))


def _booleans_as_numbers(raw: Any, resolved: Any, path: str) -> list[Problem]:
    """`epochs: yes` would silently mean one epoch: pydantic takes true for 1."""
    if isinstance(raw, bool) and not isinstance(resolved, bool):
        return [Problem(path, "must be a number", shown(raw))]
    pairs: list[tuple[Any, Any, Any]] = []
    if isinstance(raw, dict) and isinstance(resolved, dict):
        pairs = [(key, raw[key], resolved[key]) for key in raw if key in resolved]
    elif isinstance(raw, list) and isinstance(resolved, list | tuple):
        pairs = [(i, *both) for i, both in enumerate(zip(raw, resolved, strict=False))]
    prefix = f"{path}." if path else ""
    return [p for key, a, b in pairs for p in _booleans_as_numbers(a, b, f"{prefix}{key}")]


def _copied(value: Any) -> Any:
    """New containers around the same values, so that overrides leave the caller's alone."""
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def _plain(value: Any, path: str) -> Any:
    """`value` in mappings, lists and scalars only."""
    prefix = f"{path}." if path else ""
    if isinstance(value, Mapping):
        return {key: _plain(inner, f"{prefix}{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{prefix}{i}") for i, inner in enumerate(value)]
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):  # also of subclasses, such as numpy's float64
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Path):
        return str(value)
    if callable(value):
        return function_name(value)
    rule = "cannot be written in a job file; give a number, text, list or mapping"
    raise JobError([Problem(path, rule, shown(value))])
