"""A table of files and labels: every row is read as it is meant, or refused with its line."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from io import StringIO

Row = dict[str, str]


def read_table(content: bytes) -> tuple[list[str], Iterator[tuple[int, Row]]]:
    """Return the columns of a CSV file, and an iterator over the rows and their lines, from 1.

    Commas, semicolons or tabs separate its values. Raises ValueError, also the iterator: it is
    empty or not UTF-8, a quote never ends, a row has more or fewer values than there are columns,
    or two columns have one name.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line} is not UTF-8 text; save the file as UTF-8") from error
    lines = _lines(text)
    _, header = next(lines, (1, []))
    columns = [name.strip() for name in header]
    repeated = [name for name, count in Counter(columns).items() if name and count > 1]
    if repeated or not columns:
        rule = f"has several columns {repeated[0]}" if repeated else "is empty"
        raise ValueError(f"{rule}; the first line names the columns")
    return columns, ((line, dict(zip(columns, values, strict=True))) for line, values in lines)


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the values of each row that has some, the first with the names of the columns.

    With each comes the line at which it begins.
    """
    delimiter, columns = max(",;\t", key=text.partition("\n")[0].count), 0  # of the header
    # Blanks may stand before a quote; a name that begins with one needs quotes.
    stream = StringIO(text, newline="")
    reader = csv.reader(stream, delimiter=delimiter, skipinitialspace=True, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            values = next(reader, None)
        except csv.Error as error:
            rule = f"begins a quote that never ends, or ends within a value: {error}"
            raise ValueError(f"line {line} {rule}") from error
        if values is None:
            return
        if any(values):
            columns = columns or len(values)
            if len(values) != columns:
                counts = f"{len(values)} values, but the first line names {columns} columns"
                raise ValueError(f"line {line} has {counts}")
            yield line, values


def shorten(text: str, length: int = 100) -> str:
    """Return a value of a table for an error message."""
    return text if len(text) <= length else f"{text[:length]}…"
