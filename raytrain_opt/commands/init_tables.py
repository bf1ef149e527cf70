"""What the tables beside images mean to `init`: which column names images, which one classes.

Columns need usual names, and everything that could mean several things is refused: a wrong guess
trains on wrong labels.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from raytrain_opt.data.image_folder import image_paths, read_table, shorten
from raytrain_opt.errors import DataError

# Words for the sets in names of folders and files, and in tables; earlier ones are preferred.
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "test", "testing", "dev", "eval"), "test"),
}
# Usual names of columns; only letters count.
_FILE = r"(file|image|img)?(id|name|path|file)s?|fname|image|img"
_LABEL = r"labels?|class(name)?|category|target|y"
_SPLIT = r"split|(data|sub)?set|partition"

Row = tuple[str, str, str]  # file, label, split


def read_tables(
    folder: Path,
    files: Sequence[Path],
    label_column: str | None,
    left_out: Counter[str],
    notes: list[str],
) -> list[Row]:
    """Return the rows of the table that names images by path, name or name without suffix.

    Raises DataError: several tables do, and none has the images of all others.
    """
    images: dict[str, str] = {}
    paths = [os.path.relpath(path, folder) for path, _ in image_paths(folder, left_out)]
    for path in paths:
        name = os.path.basename(path)
        for key in {name, os.path.splitext(name)[0]}:
            images[key] = "" if key in images else path  # "": of several images
    images.update((path, path) for path in paths)
    left_out.subtract(file.suffix.lower() for file in files)

    def find(value: str) -> str | None:
        path = os.path.normpath(value.strip().replace("\\", "/"))
        return images.get(os.path.relpath(path, folder) if os.path.isabs(path) else path)

    tables = [_read_table(file, find, label_column, notes) for file in files]
    rows = max(tables, key=len, default={})
    if any(table.keys() - rows.keys() for table in tables):
        rule = "several tables name images; move all but one away, or write one with a split"
        raise DataError(str(folder), "; ".join([rule, *notes]))
    return [*rows.values()]


def _read_table(
    file: Path, find: Callable[[str], str | None], label_column: str | None, notes: list[str]
) -> dict[str, Row]:
    """Return the images that a table lists, and note how it was read; no rows if it lists none.

    Raises DataError: it is damaged, or what its columns mean is not clear.
    """
    note, rows = file.name, {}
    try:
        columns, iterator = read_table(file.read_bytes())
        lines = list(iterator)
        note += f" has the columns {', '.join(map(shorten, columns[:20]))}"
        matches = {
            name: sum(find(row[name]) is not None for _, row in lines)
            for name in _usual(_FILE, columns)
        }
        of_files = max(matches, key=matches.__getitem__, default="file")
        matched = matches.get(of_files, 0)
        note += f"; {matched:,} of {len(lines):,} rows name an image by column {of_files}"
        note += "" if matches else ", as no column has a usual name (file, path, image, id, …)"
        if matched:
            others = [name for name in columns if name != of_files]
            labels = [label_column] if label_column in others else _usual(_LABEL, others)
            if len(labels) != 1 or label_column not in (None, *labels):
                hint = f"--label-column COLUMN, which may be {', '.join(others)}"
                raise ValueError(f"name the column of the classes: {hint}")
            words = {name: {row[name].strip().lower() for _, row in lines} for name in others}
            usual = _usual(_SPLIT, others)
            splits = [n for n in others if n in usual or words[n] <= SPLITS.keys()]
            if len(splits) > 1:
                raise ValueError(f"several columns may be the split: {', '.join(splits)}")
            note += f", the class by {labels[0]}" + "".join(f", the set by {n}" for n in splits)
            rows = _labeled_rows(lines, find, of_files, *labels, *splits)
    except ValueError as error:
        rule = f"{note}; {error}; or move the table away, if folders are the classes"
        raise DataError(str(file), rule) from error
    notes.append(f"{note}; {len(rows):,} images have a class; blanks around it are removed")
    return rows


def _usual(pattern: str, columns: Sequence[str]) -> list[str]:
    return [name for name in columns if re.fullmatch(pattern, re.sub("[^a-z]", "", name.lower()))]


def _labeled_rows(
    lines: Sequence[tuple[int, dict[str, str]]],
    find: Callable[[str], str | None],
    of_files: str,
    of_labels: str,
    of_splits: str = "",
) -> dict[str, Row]:
    """Return the row of each image that has a label. Raises ValueError."""
    rows: dict[str, Row] = {}
    seen: dict[str, int] = {}
    for line, row in lines:
        image, label = find(row[of_files]), row[of_labels].strip()
        split = row[of_splits].strip().lower() if of_splits else "train"
        if image == "":
            raise ValueError(
                f"line {line}: {row[of_files]} names several images; list their paths"
            )
        if split not in SPLITS:
            raise ValueError(f"line {line}: {of_splits} must be train or test, not {split!r}")
        if image and label:
            if (first := seen.setdefault(image, line)) != line:
                raise ValueError(f"lines {first} and {line} both name {image}")
            rows[image] = image, label, SPLITS[split]
    return rows
