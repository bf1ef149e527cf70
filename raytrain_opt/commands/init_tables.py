"""The table beside images: a column that names them, one of classes, perhaps one of the sets.

Everything that could mean something else is refused: a wrong guess trains on wrong labels.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
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
    """Return the rows of the table that names the images of `folder`; note what each table has.

    By path, name, or name without suffix. Of several tables one must name all images of each other
    one, and more. Raises DataError: none does, one is damaged, or what its columns mean is not
    clear.
    """
    paths = [os.path.relpath(path, folder) for path, _ in image_paths(folder, left_out)]
    images: dict[str, str] = {}  # by every name; "" of several images
    for path in paths:
        name = os.path.basename(path)
        for key in {name, os.path.splitext(name)[0]}:
            images[key] = "" if key in images else path
    images |= {path: path for path in paths}
    left_out.subtract(file.suffix.lower() for file in files)
    tables = list[list[Row]]()
    for file in files:
        notes.append(file.name)
        try:
            tables.append(_read_table(file, images, label_column, notes))
        except ValueError as error:
            rule = f"{notes[-1]}; {error}; or move the table away, if folders are the classes"
            raise DataError(str(file), rule) from error
    tables.sort(key=len)
    *others, found = ({image for image, *_ in rows} for rows in tables or [[]])
    if any(named and not named < found for named in others):
        rule = "several tables name images; move all but one away, or write one with a split"
        raise DataError(str(folder), "; ".join([rule, *notes]))
    return tables[-1] if tables else []


def _read_table(
    file: Path, images: Mapping[str, str], label_column: str | None, notes: list[str]
) -> list[Row]:
    """Return the images that a table lists, and note how it is read. Raises ValueError."""
    columns, iterator = read_table(file.read_bytes())
    lines = list(iterator)

    def find(row: dict[str, str], column: str) -> str | None:
        value = row[column].strip().replace("\\", "/")
        return images.get(os.path.relpath(os.path.join(file.parent, value), file.parent))

    counts = {
        column: sum(find(row, column) is not None for _, row in lines)
        for column in _usual(_FILE, columns)
    }
    of_files = max(counts, key=counts.__getitem__, default="file")
    notes[-1] += f" has the columns {', '.join(map(shorten, columns[:20]))}; "
    notes[-1] += f"{counts.get(of_files, 0):,} of {len(lines):,} rows name an image "
    notes[-1] += f"by column {of_files}"
    if not counts.get(of_files):
        return []
    others = [name for name in columns if name != of_files]
    labels = [label_column] if label_column in others else _usual(_LABEL, others)
    if len(labels) != 1 or label_column not in (None, *labels):
        hint = f"--label-column COLUMN, which may be {', '.join(others)}"
        raise ValueError(f"name the column of the classes: {hint}")
    words = {name: {row[name].strip().lower() for _, row in lines} for name in others}
    usual = _usual(_SPLIT, others)
    splits = [name for name in others if name in usual or words[name] <= SPLITS.keys()]
    if len(splits) > 1:
        raise ValueError(f"several columns may be the split: {', '.join(splits)}")
    notes[-1] += f", the class by {labels[0]}" + "".join(f", the set by {n}" for n in splits)
    rows, seen = list[Row](), dict[str, int]()
    for line, row in lines:
        split = row[splits[0]].strip().lower() if splits else "train"
        if split not in SPLITS:
            raise ValueError(f"line {line}: {splits[0]} must be train or test, not {split!r}")
        image, label = find(row, of_files), row[labels[0]].strip()
        if image == "":
            raise ValueError(f"line {line}: {row[of_files]} names several images; list paths")
        if image and label:
            if (first := seen.setdefault(image, line)) != line:
                raise ValueError(f"lines {first} and {line} both name {image}")
            rows.append((image, label, SPLITS[split]))
    notes[-1] += f"; {len(rows):,} images have a class; blanks around it are removed"
    return rows


def _usual(pattern: str, columns: Sequence[str]) -> list[str]:
    return [name for name in columns if re.fullmatch(pattern, re.sub("[^a-z]", "", name.lower()))]
