"""Read records of a run, from a local directory or a URI."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from raytrain_opt import storage
from raytrain_opt.errors import RecordError
from raytrain_opt.recording.base import SCHEMA_VERSION, Record

R = TypeVar("R", bound=Record)


def read_lines(run_dir: str, name: str, kind: type[R]) -> list[R]:
    """Return the complete lines, if any. Raises RecordError naming one."""
    text = read_text(run_dir, name) or ""
    return [
        _parse(line, kind, f"{run_dir}/{name}, line {number}")
        for number, line in enumerate(text.split("\n")[:-1], 1)
    ]


def read_last(run_dir: str, name: str, kind: type[R]) -> R | None:
    """Return a record's last complete line, parsed alone; None without. Raises RecordError."""
    lines = (read_text(run_dir, name) or "").rsplit("\n", 2)
    return _parse(lines[-2], kind, f"{run_dir}/{name}, last line") if len(lines) > 1 else None


def read_record(run_dir: str, name: str, kind: type[R]) -> R | None:
    """Return the record in one file; None when there is no such file. Raises RecordError."""
    text = read_text(run_dir, name)
    return None if text is None else _parse(text, kind, f"{run_dir}/{name}")


def read_text(run_dir: str, name: str) -> str | None:
    """Return the text of a file; None without it. Raises RecordError for other than UTF-8."""
    content = storage.read(run_dir, name)
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1 if content else 1
        raise RecordError(f"{run_dir}/{name}, line {line}: is damaged (not UTF-8)") from error


def first_error(error: ValidationError) -> str:
    """Return the first error and its location."""
    details = error.errors(include_url=False)[0]
    field = ".".join(map(str, details["loc"]))
    return f"{field}: {details['msg']}" if field else details["msg"]


def _parse(text: str, kind: type[R], source: str) -> R:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        for details in error.errors(include_url=False):
            if details["loc"] == ("schema_version",) and details["type"] == "less_than_equal":
                raise RecordError(
                    f"{source}: was written by a newer version of this package (schema "
                    f"{details['input']}); this version reads schemas up to {SCHEMA_VERSION}"
                ) from error
        raise RecordError(f"{source}: is damaged ({first_error(error)})") from error
