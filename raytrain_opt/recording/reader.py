"""Read records of a run, from a local directory or a URI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from pydantic import ValidationError

from raytrain_opt import storage
from raytrain_opt.errors import RecordError
from raytrain_opt.recording.records import Record
from raytrain_opt.storage import complete_lines

R = TypeVar("R", bound=Record)

REMEDY = (
    "restore the file from a backup. The checkpoints do not need it: evaluate and predict read "
    "them, and --set model.weights=RUN_DIR starts a new run from them"
)


def read_lines(run_dir: str, kind: type[R], count: int = 0) -> list[R]:
    """Return the complete lines of a record, at least `count`. Raises as `parse_lines`."""
    return parse_lines(read_raw_lines(run_dir, kind), run_dir, kind, count)


def read_raw_lines(run_dir: str, kind: type[Record]) -> list[bytes]:
    """Return the complete lines as they are, none without the file. Raises StorageError."""
    return complete_lines(storage.read(run_dir, kind.file) or b"")


def parse_lines(lines: Sequence[bytes], run_dir: str, kind: type[R], count: int = 0) -> list[R]:
    """Return all lines as records.

    Raises RecordError for one that is damaged, repeated or not in its place, and for fewer lines
    than a result or a checkpoint counts.
    """
    source = f"{run_dir}/{kind.file}"
    records = [_parse(line, kind, f"{source}, line {n}") for n, line in enumerate(lines, 1)]
    numbers = [getattr(record, kind.counted_by, n) for n, record in enumerate(records, 1)]
    if len(set(lines)) < len(lines) or numbers != [*range(1, len(lines) + 1)]:
        raise RecordError(f"{source}: has a line twice, or without the one before; {REMEDY}")
    if len(lines) < count:
        rule = f"has {len(lines)} lines, but had {count} at the last checkpoint: it was cut or"
        raise RecordError(f"{source}: {rule} replaced afterwards; {REMEDY}")
    return records


def read_last(run_dir: str, kind: type[R]) -> R | None:
    """Return a record's last complete line, parsed alone; None without. Raises RecordError."""
    lines = read_raw_lines(run_dir, kind)
    return _parse(lines[-1], kind, f"{run_dir}/{kind.file}, last line") if lines else None


def read_record(run_dir: str, kind: type[R]) -> R | None:
    """Return the record in one file; None when there is no such file. Raises RecordError."""
    content = storage.read(run_dir, kind.file)
    return None if content is None else _parse(content, kind, f"{run_dir}/{kind.file}")


def read_text(run_dir: str, name: str) -> str | None:
    """Return the text of a file; None without it. Raises RecordError for other than UTF-8."""
    content = storage.read(run_dir, name)
    try:
        return None if content is None else content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1 if content else 1
        rule = f"is damaged (not UTF-8); {REMEDY}"
        raise RecordError(f"{run_dir}/{name}, line {line}: {rule}") from error


def first_error(error: ValidationError) -> str:
    """Return the first error and its location."""
    details = error.errors(include_url=False)[0]
    field = ".".join(map(str, details["loc"]))
    return f"{field}: {details['msg']}" if field else details["msg"]


def _parse(text: bytes, kind: type[R], source: str) -> R:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise RecordError(f"{source}: is damaged ({first_error(error)}); {REMEDY}") from error
