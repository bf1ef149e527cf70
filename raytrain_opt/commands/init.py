"""`raytrain-opt init`: find the data of a folder, examine them, and write a job file."""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import StringIO
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import torch

from raytrain_opt.commands.init_tables import SPLITS, Row, read_tables
from raytrain_opt.config.data import ArraysData, HoldOut, ImageFolderData, ShardsData
from raytrain_opt.data import DataInfo, load_shared_data, open_data
from raytrain_opt.data.base import SourceSplit, refuse_channels_last
from raytrain_opt.data.image_folder import (
    COLUMNS,
    class_folders,
    image_paths,
    left_out_kind,
    left_out_note,
)
from raytrain_opt.data.images import center_crop, open_image
from raytrain_opt.data.source import ImageSource
from raytrain_opt.errors import DataError, printable
from raytrain_opt.monitoring import gpu_names
from raytrain_opt.storage import write_text

_VALID = (
    "valid are folders of images, one for each class, perhaps below train/ and val/; images and a "
    "CSV file with their names and labels; train_x.npy, train_y.npy, test_x.npy and test_y.npy; "
    "or train-000000.tar and val-000000.tar, as `raytrain-opt shard` writes them"
)
_TEST_FRACTION = 0.2
# Number of image files to test-decode, evenly spaced.
_EXAMINED = 2000
# Where the largest class has this many times the samples of the smallest, settings are named.
_IMBALANCE = 2
# Names of folders and of unreadable files that are printed.
_NAMES = 5

Section = dict[str, Any]


@dataclass(frozen=True)
class Facts:
    """What is known about data."""

    info: DataInfo
    side: int  # median of the images' shorter sides, in pixels
    sizes: str
    examined: int = 0  # files
    unreadable: tuple[str, ...] = ()  # a line for each of these files

    @property
    def imbalance(self) -> float:
        """Ratio of the samples of the largest and the smallest class."""
        return max(self.info.class_counts) / min(self.info.class_counts)


@dataclass(frozen=True)
class Choice:
    """Settings of the job. `image_size`: None for arrays, which have their own."""

    model: str
    image_size: int | None
    global_batch_size: int
    epochs: int


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
    gpus = gpu_names()
    try:
        section, rows, notes = find_data(folder.absolute(), labels, label_column)
    except OSError as error:
        raise DataError(str(folder), f"cannot be read: {error}") from error
    if rows:
        write_text(labels, _to_csv(rows))
    try:
        facts = examine(section)
    except DataError:
        labels.unlink(missing_ok=True)
        raise
    write_text(output, job_text(folder.absolute().name, section, facts, gpus=len(gpus)))
    devices = f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU"
    memory_gib = psutil.virtual_memory().total / 2**30
    table = {
        **_table(section, facts),
        "notes": f"\n{'':15}".join([*notes, *facts.info.notes]),
        "machine": f"{len(os.sched_getaffinity(0))} cores, {memory_gib:.0f} GiB, {devices}",
        "written": f"{output}, and {labels.name}, the list of its files" if rows else str(output),
    }
    for name, value in table.items():
        if value:
            echo(f"  {name:12} {value}")
    echo(
        f"next:\n  raytrain-opt validate {output}    check job and data\n"
        f"  raytrain-opt run {output}         train; the report will be below runs/"
    )


def find_data(
    folder: Path, labels: Path, label_column: str | None
) -> tuple[Section, list[Row], list[str]]:
    """Return the data section, the rows of `labels` if it needs them, and lines about the choice.

    Raises DataError: there are no data, or they may have several meanings.
    """
    notes: list[str] = []
    names, unread = _split_folders(folder)
    if label_column is None:
        for find in (_find_shards, _find_arrays):
            if section := find(folder, notes):
                return section, [], notes
        if len(names) == 2:
            splits = {"train_split": names["train"], "test_split": names["test"]}
            return {"name": "image_folder", "root": str(folder), **splits}, [], unread
    left_out: Counter[str] = Counter()
    tables = _files(folder, "*.csv", "*.tsv")
    rows = read_tables(folder, tables, label_column, left_out, notes) if tables else []
    if label_column is None and not rows:
        notes += unread
        left_out.clear()  # of the tables, which are not used
        rows = _class_folders(folder, names.get("train", ""), left_out, notes)
    notes += left_out_note(left_out)
    classes = sorted({label for _, label, _ in rows})
    if len(classes) < 2:
        found = [f"all {len(rows):,} images are of one class, {label}" for label in classes]
        rules = ["has no data to train on", *found, *notes, _VALID]
        raise DataError(str(folder), "; ".join(rules))
    if len({label.casefold() for label in classes}) < len(classes):
        notes.append("some classes differ in upper and lower case only")
    if not any(split == "test" for _, _, split in rows):
        rows = _split_rows(rows)
        notes.append("a fifth of each class, drawn at random, is the test set")
        if not any(split == "test" for _, _, split in rows):
            rule = "no class has three images, so that one could be a test image"
            raise DataError(str(folder), "; ".join([rule, *notes]))
    section = {"name": "image_folder", "root": str(folder), "labels": str(labels)}
    return section, sorted(rows), notes


def _splits(names: Iterable[str]) -> dict[str, str]:
    """Return the names of the training set and the test set, which have a usual word in them."""
    words = {word: name for name in names for word in re.split(r"[^a-z]+", name.lower())}
    return {split: words[word] for word, split in reversed(SPLITS.items()) if word in words}


def _split_folders(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return the folders of the sets, which have folders of classes, and a note on all others."""
    folders = class_folders(folder, Counter())
    names = _splits(name for name in folders if class_folders(folder / name, Counter()))
    others = [name for name in folders if "train" in names and name not in names.values()]
    notes = [f"folders that are not read: {', '.join(others[:_NAMES])}"] if others else []
    return names, notes


def _files(folder: Path, *patterns: str) -> list[Path]:
    """Return the plain files of a folder by their names, without hidden ones."""
    files = sorted(file for pattern in patterns for file in folder.glob(pattern))
    return [file for file in files if file.is_file() and left_out_kind(file.name) != "hidden"]


def _find_arrays(folder: Path, notes: list[str]) -> Section | None:
    files = _files(folder, "*.npy")
    if not files:
        if _files(folder, "*.npz"):
            example = "numpy.save('train_x.npy', numpy.load('FILE.npz')['train_x'])"
            raise DataError(str(folder), f"has .npz files; write each array to its own: {example}")
        return None
    arrays: dict[str, dict[Path, tuple[int, ...]]] = {"train": {}, "test": {}}
    for file in files:
        words = SPLITS.keys() & re.split(r"[^a-z]+", file.stem.lower())
        if not words:
            continue
        try:
            shape = np.load(file, mmap_mode="r", allow_pickle=False).shape
        except Exception as error:  # a damaged header can make numpy raise anything
            raise DataError(str(file), f"is not an array of plain numbers: {error}") from error
        arrays[SPLITS[max(words)]][file] = shape
    if not any(arrays.values()):
        return None
    section: Section = {"name": "arrays"}
    for split, shapes in arrays.items():
        labels = [file for file, shape in shapes.items() if shape[1:] in ((), (1,))]
        samples = [file for file in shapes if file not in labels]
        if len(samples) != 1 or len(labels) != 1:
            names = ", ".join(f"{file.name} {list(shape)}" for file, shape in shapes.items())
            rule = "the .npy files are not one array of samples and one of labels for each set"
            raise DataError(str(folder), f"{rule}; of {split}: {names or 'none'}; {_VALID}")
        section[split] = [str(samples[0]), str(labels[0])]
        notes.append(f"{split}: samples {samples[0].name}, labels {labels[0].name}")
    return section


def _find_shards(folder: Path, notes: list[str]) -> Section | None:
    groups: dict[str, list[str]] = {}
    for file in _files(folder, "*.tar"):
        if match := re.fullmatch(r"(.*?)(\d+)", file.stem):
            groups.setdefault(match[1], []).append(match[2])
    names = _splits(groups)
    if len(names) < 2:
        return None
    patterns = {
        split: f"{folder}/{prefix}{{{groups[prefix][0]}..{groups[prefix][-1]}}}.tar"
        for split, prefix in sorted(names.items(), reverse=True)
    }
    return {"name": "shards", **patterns}


def _to_csv(rows: Sequence[Row]) -> str:
    text = StringIO(newline="")
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows([COLUMNS, *rows])
    try:
        text.getvalue().encode()
    except UnicodeEncodeError as error:
        name = ascii(error.object[: error.end].rpartition("\n")[2])
        raise DataError(name, "is not UTF-8, which the list of files needs; rename it") from error
    return text.getvalue()


def _class_folders(
    folder: Path, train: str, left_out: Counter[str], notes: list[str]
) -> list[Row]:
    """Return the images in folders of classes, which may lie below a folder `train`.

    Raises DataError: the folders may be sets, because they have the same folders in them.
    """
    root, rows = folder / train, list[Row]()
    classes = class_folders(root, left_out)
    inner = {".": {*classes}}  # folders that have folders
    for name in classes:
        paths = [os.path.relpath(path, folder) for path, _ in image_paths(root / name, left_out)]
        if not paths:
            notes.append(f"{name}/ has no image and is not a class")
        elif name != name.strip():
            raise DataError(str(root / name), "has a name that begins or ends with a blank")
        rows += [(path, name, "") for path in paths]
        if below := {*class_folders(root / name, Counter())}:
            inner[name] = below
    for first, second in combinations(inner, 2):
        if len(shared := sorted(inner[first] & inner[second])) > 1:
            rule = (
                f"{first}/ and {second}/ both have {', '.join(shared[:_NAMES])}; if these are the "
                "classes, call the others train and test; if not, list all files in a table with "
                "the columns file and label"
            )
            raise DataError(str(root), rule)
    return rows


def _split_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with a fifth of each class, drawn at random, as the test set."""
    counts = Counter(label for _, label, _ in rows)
    left = {label: round(_TEST_FRACTION * count) for label, count in counts.items()}
    split = []
    for i in np.random.default_rng(0).permutation(len(rows)).tolist():
        file, label, _ = rows[i]
        split.append((file, label, "test" if left[label] > 0 else "train"))
        left[label] -= 1
    return split


def examine(section: Section) -> Facts:
    """Read labels, and at most 2,000 samples, as a training does. Raises DataError."""
    kinds = {"arrays": ArraysData, "image_folder": ImageFolderData, "shards": ShardsData}
    parsed = kinds[section["name"]](**section)
    shared, cpu = load_shared_data(parsed), torch.device("cpu")
    data = open_data(parsed, shared, hold_out=HoldOut(0), seed=0, device=cpu, channels_last=True)
    info = data.info
    if not parsed.on_nodes:
        if len(info.sample_shape) != 3:
            rule = "named models take images; for others write a function (own-model-and-data.md)"
            raise DataError("data.train.0", f"has samples {list(info.sample_shape)}; {rule}")
        refuse_channels_last(info.sample_shape)
        channels, height, width = info.sample_shape
        return Facts(info, min(height, width), f"{width} x {height}, {channels} channels")
    source = cast(ImageSource, shared)
    total = info.train_size + info.test_size
    spread = np.linspace(0, total - 1, min(_EXAMINED, total)).astype(int)

    def read(i: int) -> tuple[int, int, bool] | str:
        split: SourceSplit = "train" if i < info.train_size else "test"
        index = i if split == "train" else i - info.train_size
        try:
            content = source.content(split, index)
            center_crop(content, 8)
            with open_image(content) as image:
                return (*image.size, image.mode in ("1", "L"))
        except (OSError, ValueError) as error:
            return f"{source.describe(split, index)}: {error}"

    with ThreadPoolExecutor() as pool:
        results = list(pool.map(read, spread.tolist()))
    unreadable = tuple(result for result in results if isinstance(result, str))
    images = np.array([result for result in results if not isinstance(result, str)])
    if not len(images):
        raise DataError(source.field, f"no image can be read; {unreadable[0]}")
    readable = {i for i, result in zip(spread, results, strict=True) if isinstance(result, tuple)}
    for number, name in enumerate(info.class_labels):
        files = np.flatnonzero(source.labels == number).tolist()
        if readable.isdisjoint(files) and all(isinstance(read(i), str) for i in files):
            rule = f"none of the {len(files):,} files of class {name} can be read"
            raise DataError(source.field, f"{rule}; {read(files[0])}")
    (width, height, _), (max_width, max_height, _) = images.min(0), images.max(0)
    sizes = f"{width} x {height}"
    if (width, height) != (max_width, max_height):
        sizes += f" to {max_width} x {max_height}"
    sizes += f" pixels, {100 * images[:, 2].mean():.0f} % of them gray"
    side = int(np.median(images[:, :2].min(1)))
    return Facts(info, side, sizes, len(results), unreadable)


def choose(facts: Facts, *, gpus: int, is_files: bool) -> Choice:
    """Choose by rules of thumb: the size of images, their number, and whether there are GPUs."""
    side, train = facts.side, facts.info.train_size
    if side < 16:
        model, image_size = "small_cnn", side
    elif side <= 48 or facts.info.sample_shape[0] != 3:
        model, image_size = "cifar_resnet18" if gpus else "resnet8", side // 8 * 8
    else:
        model = "resnet50" if gpus and train >= 100_000 else "resnet18"
        sizes = (224, 160, 128, 96, 64) if gpus else (128, 96, 64)
        image_size = next((size for size in sizes if side >= 0.9 * size), 64)
    # 40 updates an epoch or more, unless that takes batches too small to use a device well.
    per_device = 2 ** int(math.log2(max(16, train / 40 / max(1, gpus))))
    batch = min(per_device, 128 if gpus else 64) * max(1, gpus)
    batch = min(batch, max(1, train // 2))
    updates = 15_000 if gpus else 1000
    epochs = min(max(10, math.ceil(updates / (train // batch))), 60)
    return Choice(model, image_size if is_files else None, batch, epochs)


def job_text(name: str, section: Section, facts: Facts, *, gpus: int) -> str:
    """Return the job file, with a comment for each choice."""
    choice = choose(facts, gpus=gpus, is_files=section["name"] != "arrays")
    train, size = facts.info.train_size, choice.image_size
    lines = [
        "# Written by raytrain-opt init: a start, by rules of thumb; docs/job-file.md has all",
        "# settings. Optimizer and learning rate are missing because the training finds them.",
        f"name: {re.sub(r'[^A-Za-z0-9._-]+', '-', name).strip('-._')[:100] or 'run'}",
        "model:",
        f"  name: {choice.model}  # for images of about {facts.side} pixels",
    ]
    if choice.model.startswith("resnet") and choice.model != "resnet8":
        lines += [
            "  # ImageNet's weights, which torchvision downloads: photographs then need far fewer",
            "  # images and epochs, see docs/fine-tuning.md.",
            "  # weights: IMAGENET1K_V1",
        ]
    lines += ["data:", *(f"  {key}: {json.dumps(value)}" for key, value in section.items())]
    if size is not None:
        lines.append(f"  image_size: {size}  # pixels; larger is slower, and often better")
        if section["name"] == "image_folder" and size <= 48:
            lines.append("  random_crop: false  # true for photographs: cropped and mirrored")
        elif gpus and train < 100_000:
            lines.append("  augment: {policy: trivial_augment}  # for fewer than 100,000 images")
    if facts.imbalance >= _IMBALANCE:
        lines += [
            f"  # The largest class has {facts.imbalance:.1f} times the samples of the smallest.",
            "  # Take equally many samples of each, if small classes matter as much:",
            "  # sampler: balanced",
        ]
    if facts.unreadable:
        lines.append("  on_unreadable: skip  # some files cannot be read")
    lines += [
        f"epochs: {choice.epochs}  # of {train // choice.global_batch_size} updates",
        "# train_for: 1h  # in place of epochs: as many as fit into this time",
        f"global_batch_size: {choice.global_batch_size}  # samples of an update, over all workers",
        "# batch_size_search: {strategy: throughput_knee}  # measure it first, in about a minute",
    ]
    return "\n".join(lines) + "\n"


def _table(section: Section, facts: Facts) -> dict[str, str]:
    """Return the lines about the data that are printed."""
    info, counts = facts.info, facts.info.class_counts
    names = [printable(name, kept="") for name in info.class_labels]
    summary = info.summary
    low, high = counts.index(min(counts)), counts.index(max(counts))
    table = {
        "data": f"{section['name']}, {summary['data']}",
        "classes": summary["classes"],
        "balance": f"{counts[low]:,} ({names[low]}) to {counts[high]:,} ({names[high]}) samples",
        "samples": facts.sizes,
    }
    if facts.imbalance >= _IMBALANCE:
        table["balance"] += "; consider data.sampler: balanced or loss.class_weights: balanced"
    if facts.examined:
        bad = [printable(reason, kept="") for reason in facts.unreadable]
        lines = [f"{len(bad)} of {facts.examined:,} examined files", *bad[:_NAMES]]
        if len(bad) > _NAMES:
            lines.append(f"and {len(bad) - _NAMES} more")
        table["unreadable"] = f"\n{'':15}".join(lines)
    return table
