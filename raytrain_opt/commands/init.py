"""`raytrain-opt init`: find the data of a folder, examine them, and write a job file.

What could mean something else is refused: a wrong guess trains on wrong labels.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from raytrain_opt.config.data import HoldOut, ImageFolderData
from raytrain_opt.data import DataInfo, load_shared_data, open_data
from raytrain_opt.data.image_folder import (
    COLUMNS,
    class_folders,
    image_paths,
    left_out_kind,
    left_out_note,
    read_table,
    shorten,
)
from raytrain_opt.data.images import center_crop, open_image
from raytrain_opt.data.source import ImageSource
from raytrain_opt.errors import DataError, first_of, printable
from raytrain_opt.monitoring import gpu_names
from raytrain_opt.storage import write_text

_VALID = (
    "valid are folders of images, a class each, perhaps below train/ and val/; or images and a "
    "CSV file with names and labels. For arrays write data: {name: arrays, train: [x.npy, y.npy], "
    "test: [x.npy, y.npy]}"
)
# Words for the sets in names of folders and files, and in tables; earlier ones are preferred.
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "test", "testing", "dev", "eval"), "test"),
}
# Usual names of a table's columns; only letters count.
_FILE = r"(file|image|img)?(id|name|path|file)s?|fname|image|img"
_LABEL = r"labels?|class(name)?|category|target|y"
_SPLIT = r"split|(data|sub)?set|partition"
_EXAMINED = 500  # image files, evenly spaced, but at least one of each class

Section = dict[str, Any]
Row = tuple[str, str, str]  # file, label, split


def init(
    folder: Path, output: Path, echo: Callable[[str], object], label_column: str | None = None
) -> None:
    """Write a job file for the data in `folder`, and print what was found and chosen.

    `label_column`: of a table, if its name is not a usual one. Raises DataError: nothing to train
    on, data that may mean several things, or a file that would be written exists; StorageError.
    """
    labels = output.with_name(f"{output.stem}-labels.csv").absolute()
    for path in (output, labels):
        if path.exists():
            raise DataError(str(path), "exists, and init overwrites nothing; give --output FILE")
    gpus = len(gpu_names())
    try:
        section, rows, notes = _find_data(folder.absolute(), labels, label_column)
    except (OSError, ValueError) as error:
        raise DataError(str(folder), f"cannot be read: {error}") from error
    if rows:
        write_text(labels, _to_csv(rows))
    try:
        facts = _examine(section)
    except DataError:
        labels.unlink(missing_ok=True)
        raise
    write_text(output, job_text(folder.absolute().name, section, facts, gpus=gpus))
    summary, counts, bad = facts.info.summary, facts.info.class_counts, facts.unreadable
    uneven = "; consider data.sampler: balanced" if max(counts) >= 2 * min(counts) else ""
    table = [
        ("data", f"image_folder, {summary['data']}"),
        ("classes", summary["classes"]),
        ("balance", f"{min(counts):,} to {max(counts):,} samples of a class{uneven}"),
        ("size", f"about {facts.side} pixels on the shorter side"),
        *(("unreadable", printable(reason, kept="")) for reason in bad[:5]),
        *(("note", note) for note in (*notes, *facts.info.notes)),
        ("written", f"{output}" + f", and {labels.name}, the list of its files" * bool(rows)),
    ]
    for name, text in table:
        echo(f"  {name:12} {text}")
    echo(
        f"next:\n  raytrain-opt validate {quote(str(output))}    check job and data\n"
        f"  raytrain-opt run {quote(str(output))}         train; the report will be below runs/"
    )


def _find_data(
    folder: Path, labels: Path, label_column: str | None
) -> tuple[Section, list[Row], list[str]]:
    """Return the data section, the rows of `labels` if it needs them, and notes on the choice."""
    notes: list[str] = []
    section: Section = {"name": "image_folder", "root": str(folder)}
    folders = class_folders(folder, Counter())
    with_classes = [name for name in folders if class_folders(folder / name, Counter())]
    words = {word: name for name in with_classes for word in re.split(r"[^a-z]+", name.lower())}
    names = {split: words[word] for word, split in reversed(_SPLITS.items()) if word in words}
    read = {*names.values(), words.get("test")}  # beside a validation set, `test` is a third one
    unread = [name for name in folders if "train" in names and name not in read]
    unread = [f"folders that are not read: {first_of(unread)}"] if unread else []
    if label_column is None and len(names) == 2:
        return section | {"train_split": names["train"], "test_split": names["test"]}, [], unread
    rows = _read_tables(folder, label_column, notes)
    if label_column is None and not rows:
        notes += unread
        rows = _class_folders(folder, names.get("train", ""), notes)
    if len(classes := sorted({label for _, label, _ in rows})) < 2:
        found = [f"all {len(rows):,} images are of one class, {label}" for label in classes]
        arrays = [(file.name, list(np.load(file, "r").shape)) for file in folder.glob("*.npy")]
        found += [f"{name} is an array of shape {shape}" for name, shape in sorted(arrays)]
        rule = "; ".join(["has no data to train on", *found, *notes, _VALID])
        raise DataError(str(folder), rule)
    if len({label.casefold() for label in classes}) < len(classes):
        notes.append("some classes differ in upper and lower case only")
    if not any(split == "test" for *_, split in rows):
        rows = _split_rows(rows)
        notes.append("a fifth of each class, drawn at random, is the test set")
        if not any(split == "test" for *_, split in rows):
            rule = "no class has three images, so that one could be a test image"
            raise DataError(str(folder), "; ".join([rule, *notes]))
    return section | {"labels": str(labels)}, sorted(rows), notes


def _read_tables(folder: Path, label_column: str | None, notes: list[str]) -> list[Row]:
    """Return the rows of the table that names the images of `folder`; note what each table has.

    By path, name, or name without suffix. Of several tables one must name all images of the
    others, and more. Raises DataError: none does, one is damaged, or its columns are not clear.
    """
    images, left_out, tables = dict[str, str](), Counter[str](), list[list[Row]]()
    paths = [os.path.relpath(path, folder) for path, _ in image_paths(folder, left_out)]
    for path in paths:
        name = os.path.basename(path)
        for key in {name, os.path.splitext(name)[0]}:
            images[key] = "" if key in images else path  # "": of several images
    images |= {path: path for path in paths}
    for file in sorted([*folder.glob("*.csv"), *folder.glob("*.tsv")]):
        if left_out_kind(file.name) != "hidden":
            left_out[file.suffix.lower()] -= 1
            notes.append(file.name)
            try:
                tables.append(_read_table(file, images, label_column, notes))
            except ValueError as error:
                rule = f"{notes[-1]}; {error}; or move the table away, if folders are the classes"
                raise DataError(str(file), rule) from error
    *others, found = sorted(({image for image, *_ in rows} for rows in [[], *tables]), key=len)
    if any(named and not named < found for named in others):
        rule = "several tables name images; move all but one away, or write one with a split"
        raise DataError(str(folder), "; ".join([rule, *notes]))
    notes += left_out_note(left_out) if found else ()
    return max(tables, key=len, default=[])


def _read_table(
    file: Path, images: Mapping[str, str], label_column: str | None, notes: list[str]
) -> list[Row]:
    """Return the images that a table lists, and note how it is read. Raises ValueError."""
    columns, iterator = read_table(file.read_bytes())
    lines = list(iterator)

    def find(row: Mapping[str, str], column: str) -> str | None:
        path = os.path.join(file.parent, row[column].strip().replace("\\", "/"))
        return images.get(os.path.relpath(path, file.parent))

    counts = {c: sum(find(row, c) is not None for _, row in lines) for c in _usual(_FILE, columns)}
    of_files = max(counts, key=counts.__getitem__, default="file")
    notes[-1] += f" has the columns {', '.join(map(shorten, columns[:20]))}; "
    notes[-1] += f"{counts.get(of_files, 0):,} of {len(lines):,} rows name an image by {of_files}"
    if not counts.get(of_files):
        return []
    others = [name for name in columns if name != of_files]
    labels = [label_column] if label_column in others else _usual(_LABEL, others)
    if len(labels) != 1 or label_column not in (None, *labels):
        hint = f"--label-column COLUMN, which may be {', '.join(others)}"
        raise ValueError(f"name the column of the classes: {hint}")
    words = {name: {row[name].strip().lower() for _, row in lines} for name in others}
    splits = [name for name in others if _usual(_SPLIT, [name]) or words[name] <= _SPLITS.keys()]
    if len(splits) > 1 or not all(words[name] <= _SPLITS.keys() for name in splits):
        values = sorted({word for name in splits for word in words[name] - _SPLITS.keys()})
        rule = f"the sets must be train or test, in one column, not {', '.join(splits)}"
        raise ValueError(f"{rule} with {first_of(values)}" if values else rule)
    notes[-1] += f", the class by {labels[0]}" + "".join(f", the set by {n}" for n in splits)
    rows = [(find(row, of_files), row[labels[0]].strip(), row) for _, row in lines]
    if several := [row[of_files] for image, _, row in rows if image == ""]:
        raise ValueError(f"{several[0]} is the name of several images; list their paths")
    sets, of_splits = dict(_SPLITS), words[splits[0]] if splits else set()
    if tests := {"test", "testing"} & of_splits:
        sets |= dict.fromkeys((w for w in of_splits - tests if sets[w] == "test"), "val")
    found = [
        (image, label, sets[row[splits[0]].strip().lower()] if splits else "train")
        for image, label, row in rows
        if image and label
    ]
    notes[-1] += f"; {len(found):,} images have a class; blanks around it are removed"
    return found


def _usual(pattern: str, columns: Sequence[str]) -> list[str]:
    return [name for name in columns if re.fullmatch(pattern, re.sub("[^a-z]", "", name.lower()))]


def _class_folders(folder: Path, train: str, notes: list[str]) -> list[Row]:
    """Return the images in folders of classes, which may lie below a folder `train`.

    Raises DataError: the folders may be sets, because they have the same folders in them.
    """
    root, rows, left_out = folder / train, list[Row](), Counter[str]()
    classes = class_folders(root, left_out)
    inner = Counter(classes)  # folders by name
    for name in classes:
        paths = [os.path.relpath(path, folder) for path, _ in image_paths(root / name, left_out)]
        notes += [] if paths else [f"{name}/ has no image and is not a class"]
        rows += [(path, name.strip(), "") for path in paths]
        inner.update(class_folders(root / name, Counter()))
    if len(shared := sorted(name for name, count in inner.items() if count > 1)) > 1:
        rule = f"has several folders called {first_of(shared)}; if these are the classes, call "
        rule += "the folders of the sets train and test; if not, list all files in a table with "
        raise DataError(str(root), f"{rule}the columns file and label")
    notes += left_out_note(left_out)
    return rows


def _split_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with a fifth of each class, drawn at random, as the test set."""
    seen, split = Counter[str](), list[Row]()
    for i in np.random.default_rng(0).permutation(len(rows)).tolist():
        file, label, _ = rows[i]
        seen[label] += 1
        split.append((file, label, "test" if seen[label] % 5 == 3 else "train"))
    return split


def _to_csv(rows: Sequence[Row]) -> str:
    """Return a table of UTF-8 text. Raises DataError that names a file that is not."""
    for file, label, _ in rows:
        if (file + label).encode(errors="ignore").decode() != file + label:
            raise DataError(ascii(file), "is not UTF-8, which the list of files needs; rename it")
    stream = StringIO()
    csv.writer(stream, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows([COLUMNS, *rows])
    return stream.getvalue()


class Facts(NamedTuple):
    """What is known about data. `side`: the median of the images' shorter sides, in pixels.

    `unreadable`: a line for each of the examined files that cannot be read.
    """

    info: DataInfo
    side: int
    unreadable: Sequence[str] = ()


def _examine(section: Section) -> Facts:
    """Read labels, and a few files of each class, as a training does. Raises DataError."""
    parsed = ImageFolderData(**section)
    shared, cpu = load_shared_data(parsed), torch.device("cpu")
    data = open_data(parsed, shared, hold_out=HoldOut(0), seed=0, device=cpu, channels_last=True)
    info, source = data.info, cast(ImageSource, shared)
    sides, unreadable = list[int](), list[str]()
    for number, name in enumerate(info.class_labels):
        files, readable = np.flatnonzero(source.labels == number), len(sides)
        for i in files[:: 1 + len(files) * info.num_classes // _EXAMINED].tolist():
            try:
                content = source.content("train", i)
                center_crop(content, 8)
                sides.append(min(open_image(content).size))
            except (OSError, ValueError) as error:
                unreadable.append(f"{source.describe('train', i)}: {error}")
        if len(sides) == readable:
            rule = f"no examined file of class {name} can be read"
            raise DataError(source.field, f"{rule}; {unreadable[-1]}")
    return Facts(info, int(np.median(sides)), unreadable)


def choose(facts: Facts, *, gpus: int) -> tuple[str, int, int, int]:
    """Return network, image size, global batch size and epochs, by rules of thumb."""
    side, train = facts.side, facts.info.train_size
    if side < 16:
        model, image_size = "small_cnn", side
    elif side <= 48:
        model, image_size = "cifar_resnet18" if gpus else "resnet8", side // 8 * 8
    else:
        model = "resnet50" if gpus and train >= 100_000 else "resnet18"
        image_size = max(64, min(round(side / 32) * 32, 224 if gpus else 128))
    # 40 updates an epoch or more, unless that takes batches too small to use a device well.
    per_device = 2 ** int(math.log2(max(16, train / 40 / max(1, gpus))))
    batch = min(per_device, 128 if gpus else 64) * max(1, gpus)
    batch = min(batch, max(1, train // 2))
    updates = 15_000 if gpus else 1000
    return model, image_size, batch, min(max(10, math.ceil(updates / (train // batch))), 60)


def job_text(name: str, section: Section, facts: Facts, *, gpus: int) -> str:
    """Return the job file, with a comment for each choice."""
    model, size, batch, epochs = choose(facts, gpus=gpus)
    train = facts.info.train_size
    lines = [f"{key}: {json.dumps(value)}" for key, value in section.items()]
    lines.append(f"image_size: {size}  # pixels; larger is slower, and often better")
    if size <= 48:
        lines.append("random_crop: false  # true for photographs: cropped and mirrored")
    elif gpus and train < 100_000:
        lines.append("augment: {policy: trivial_augment}  # for fewer than 100,000 images")
    if facts.unreadable:
        lines.append("on_unreadable: skip  # some files cannot be read")
    data = "\n  ".join(lines)
    return f"""\
# Written by raytrain-opt init: a start, by rules of thumb; docs/job-file.md has all settings.
# Optimizer and learning rate are missing because the training finds them. Of resnet18 and
# resnet50 torchvision has weights, with which photographs need far fewer images and epochs.
name: {re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:100] or "run"}
model: {model}  # for images of about {facts.side} pixels; or {{name: resnet18, weights: DEFAULT}}
data:
  {data}
epochs: {epochs}  # of {train // batch} updates
# train_for: 1h  # in place of epochs: as many as fit into this time
global_batch_size: {batch}  # samples of an update, over all workers
# batch_size_search: {{strategy: throughput_knee}}  # measure it first, in about a minute
"""
