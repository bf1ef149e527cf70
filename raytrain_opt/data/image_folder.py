"""Image files: root/<split>/<class>/<file>, the layout of ImageNet, or listed in a CSV file."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from raytrain_opt import storage
from raytrain_opt.config.data import ImageFolderData
from raytrain_opt.data.base import SourceSplit, digest, excerpt, spread
from raytrain_opt.data.images import SUFFIXES, read_image_file
from raytrain_opt.data.source import ImageSource
from raytrain_opt.errors import DataError, StorageError, first_of, printable

Row = dict[str, str]


def read_table(content: bytes) -> tuple[list[str], Iterator[tuple[int, Row]]]:
    """Return the columns of a CSV file, and an iterator over the rows and their lines, from 1.

    Commas, semicolons or tabs separate its values. Raises ValueError, also the iterator.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line} is not UTF-8 text; save the file as UTF-8") from error
    delimiter = max(",;\t", key=text.partition("\n")[0].count)
    # Blanks may stand before a quote; a name that begins with one needs quotes.
    stream = StringIO(text, newline="")
    rows = _rows(csv.reader(stream, delimiter=delimiter, skipinitialspace=True, strict=True))
    columns = [name.strip() for _, values in islice(rows, 1) for name in values]
    named_columns = list(filter(None, columns))
    if not columns or len(set(named_columns)) < len(named_columns):
        rule = "must name its columns in the first line, each once, not"
        raise ValueError(f"{rule} {shorten(str(columns))}")

    def named() -> Iterator[tuple[int, Row]]:
        for line, values in rows:
            if len(values) != len(columns):
                counts = f"{len(values)} values, but the first line names {len(columns)} columns"
                raise ValueError(f"line {line} has {counts}")
            yield line, dict(zip(columns, values, strict=True))

    return columns, named()


def _rows(reader: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield the values of each row that has some, with the line at which it begins."""
    line = 1
    try:
        for values in reader:
            if any(values):
                yield line, values
            line = reader.line_num + 1
    except csv.Error as error:
        rule = f"begins a quote that never ends, or ends within a value: {error}"
        raise ValueError(f"line {line} {rule}") from error


def shorten(text: str, length: int = 100) -> str:
    """Return a value of a table for an error message."""
    return text if len(text) <= length else f"{text[:length]}…"


# Of the CSV file.
COLUMNS = ("file", "label", "split")
# Files of a set whose sizes a resume compares: a moment, also on a shared file system.
_MEASURED_FILES = 10_000
# Folders that systems and programs make beside files, besides hidden ones.
_SYSTEM_FOLDERS = ("__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "lost+found")


class ImageFolderSource(ImageSource):
    """Images of two folders or of a CSV file. Raises DataError for what is missing."""

    field = "data.root"

    def __init__(self, section: ImageFolderData) -> None:
        super().__init__(section.image_size, crops_at_random=section.random_crop)
        left_out: Counter[str] = Counter()
        if section.labels is not None:
            self._folders = _read_labels(section, section.labels)
        else:
            self._folders = _open_folders(section, left_out)
        self._root = os.fsencode(f"{Path(section.root).expanduser().absolute()}/")
        self.notes = left_out_note(left_out)
        if "final" in self._folders:
            self.final_size = self.size("final")
            self.notes += (f"test: {self.final_size:,} images are looked at once, at the end",)
        elif section.labels is None and _has_third_folder(section):
            self.notes += (
                "test: is not used, as its class folders differ from the training set's",
            )
        self.labels = self._folders["train"].labels
        self.class_names = tuple(self._folders["train"].classes)
        for name in self.class_names:
            if name.encode(errors="ignore").decode() != name:
                raise DataError(self.field, f"class {name!a} is not UTF-8 text; rename its folder")
        self.num_classes = len(self.class_names)

    def size(self, split: SourceSplit) -> int:
        """Return the number of files."""
        return len(self._folders[split])

    def label(self, split: SourceSplit, index: int) -> int:
        return int(self._folders[split].labels[index])

    def content(self, split: SourceSplit, index: int) -> bytes:
        return read_image_file(self._folders[split][index][0])

    def file(self, split: SourceSplit, index: int) -> str:
        """Return the path of an image below data.root."""
        return printable(self._folders[split][index][0].removeprefix(os.fsdecode(self._root)))

    def describe(self, split: SourceSplit, index: int) -> str:
        """Return the file and its class, for an error message."""
        folder = self._folders[split]
        path, label = folder[index]
        return f"{path} (class {folder.classes[label]}) cannot be read"

    def digest(self) -> str:
        """Return a digest of names and labels and, of files evenly spread, sizes and excerpts."""
        return digest(part for files in self._folders.values() for part in self._parts(files))

    def _parts(self, files: ImageFiles) -> Iterator[bytes | memoryview]:
        # Relative to the root, which may be another one on another machine.
        yield files.paths.tobytes().replace(self._root, b"\0")
        yield files.labels.data
        yield from (excerpt(files[index][0]) for index in spread(len(files)))
        for index in spread(len(files), _MEASURED_FILES):
            with suppress(OSError):  # a link to nowhere
                yield b"%d " % os.stat(files[index][0]).st_size


class ImageFiles:
    """Files of a set, and the class of each: `labels`, indices of `classes`.

    The paths are one array of bytes: 1.3 million objects would take 243 MiB, which every loader
    process would copy by counting references.
    """

    def __init__(self, classes: Sequence[str], files: Iterable[tuple[str, int]]) -> None:
        pairs = [(os.fsencode(path), label) for path, label in files]
        self.classes, self.paths = classes, np.array([path for path, _ in pairs], np.bytes_)
        self.labels = np.array([label for _, label in pairs], np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[str, int]:
        return os.fsdecode(self.paths[index]), int(self.labels[index])


def list_folder(folder: Path, left_out: Counter[str], seen: dict[str, str]) -> ImageFiles:
    """List files and classes of a folder, in the order of torchvision, but for numbers.

    Counts what it leaves out. `seen`: the files of all folders by the path that links lead to.
    Raises OSError, also for a file that was seen: it has one class and belongs to one set.
    """
    folder = folder.absolute()
    if not (classes := class_folders(folder, left_out)):
        raise FileNotFoundError("it has no folder of a class")

    def pairs() -> Iterator[tuple[str, int]]:
        for i, name in enumerate(classes):
            for path, real_path in image_paths(folder / name, left_out):
                if (other := seen.setdefault(real_path, path)) is not path:
                    raise FileExistsError(f"{other} and {path} are one file; remove one of them")
                yield path, i

    files = ImageFiles(classes, pairs())
    counts = np.bincount(files.labels, minlength=len(classes))
    if not counts.all():
        raise FileNotFoundError(f"class {classes[int(counts.argmin())]} has no image file")
    return files


def class_folders(folder: Path, left_out: Counter[str]) -> list[str]:
    """Return the names of the folders in a folder, also of links; count everything else."""
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            kind = left_out_kind(entry.name)
            if entry.is_dir() and kind != "hidden":
                names.append(entry.name)
            else:
                left_out[kind or "beside the folders of classes"] += 1
    return in_order(names)


def in_order(names: Collection[str]) -> list[str]:
    """Sort the names of classes, numbers by their values if all are numbers."""
    return sorted(sorted(names), key=int if all(map(str.isdecimal, names)) else str)


def image_paths(folder: str | Path, left_out: Counter[str]) -> Iterator[tuple[str, str]]:
    """Yield the image files below a folder, sorted, each with the path that links lead to.

    Counts what it leaves out, by kind. Links to folders are left out: they may lead back to a
    folder above and repeat all files. Raises OSError.
    """
    pending, directories = [str(folder)], []
    while pending:
        directory, files = pending.pop(), []
        with os.scandir(directory) as iterator:
            entries = list(iterator)
        for entry in entries:
            kind = left_out_kind(entry.name)
            if entry.is_dir():
                kind = "hidden" if kind == "hidden" else "link to a folder" * entry.is_symlink()
                pending += [] if kind else [entry.path]
            elif not (kind or entry.is_file() or entry.is_symlink()):
                kind = "no plain file"
            elif not kind:
                files.append((entry.name, entry.is_symlink()))
            left_out[kind] += bool(kind)
        directories.append((directory, sorted(files)))
    for directory, files in sorted(directories):
        real_directory = os.path.realpath(directory)
        for name, is_link in files:
            path = f"{directory}/{name}"
            yield path, os.path.realpath(path) if is_link else f"{real_directory}/{name}"


def left_out_kind(path: str) -> str:
    """Return why a file of this name or path is no image; nothing if it is one."""
    *_, name = parts = path.split("/")
    if any(part.strip(".") and part[0] == "." or part in _SYSTEM_FOLDERS for part in parts):
        return "hidden"
    suffix = name[name.rfind(".") :].lower() if "." in name else "no suffix"
    return "" if suffix in SUFFIXES else suffix


def left_out_note(left_out: Counter[str]) -> tuple[str, ...]:
    """Return a line about the files that were left out, if there are any."""
    kinds = [f"{count:,} {kind}" for kind, count in left_out.most_common(8) if count]
    text = f"{left_out.total():,} files or folders are left out: {', '.join(kinds)}"
    return (printable(text),) if kinds else ()


def _read_labels(section: ImageFolderData, path: str) -> dict[SourceSplit, ImageFiles]:
    """Read the files of both sets from the CSV file `data.labels`."""
    try:
        if (content := storage.read(*storage.folder_and_name(path))) is None:
            raise ValueError("does not exist")
        files = _listed_files(content, os.path.abspath(os.path.expanduser(section.root)))
        # Of three sets, val is evaluated after each epoch.
        tests = {"test": files["val"] or files["test"]}
        if files["val"] and files["test"]:
            tests["final"] = files["test"]
        for split, of_split in {"train": files["train"], "test": tests["test"]}.items():
            if not of_split:
                raise ValueError(f"has no file of split {split}")
        classes = in_order({label for _, label in files["train"]})
        numbers = {name: number for number, name in enumerate(classes)}
        if unknown := {y for of_split in tests.values() for _, y in of_split} - numbers.keys():
            raise ValueError(f"has labels that only test files have: {first_of(sorted(unknown))}")
    except StorageError as error:
        raise DataError("data.labels", str(error)) from error
    except ValueError as error:
        raise DataError("data.labels", f"{path} {error}") from error
    sets = {"train": files["train"], **tests}
    return {
        cast(SourceSplit, split): ImageFiles(classes, ((f, numbers[y]) for f, y in of_split))
        for split, of_split in sets.items()
    }


def _listed_files(content: bytes, root: str) -> dict[str, list[tuple[str, str]]]:
    """Return path and label of the files of each split. Raises ValueError that names the line."""
    columns, rows = read_table(content)
    if not set(COLUMNS) <= set(columns):
        names = ", ".join(map(shorten, columns[:10]))
        rule = "needs a first line with the names file, label and split"
        raise ValueError(f"{rule}; it has {names}")
    files: dict[str, list[tuple[str, str]]] = {"train": [], "val": [], "test": []}
    seen: dict[str, int] = {}
    real_directory = lru_cache(4096)(os.path.realpath)
    for line, row in rows:
        file, label, split = row["file"], row["label"].strip(), row["split"].strip()
        if split not in files or not label:
            rule = "needs a label, and the split train, val or test; it has"
            values = f"{shorten(label)!r}, {shorten(split)!r}"
            raise ValueError(f"line {line}: {shorten(file)} {rule} {values}")
        path = os.path.normpath(os.path.join(root, file))
        if os.path.commonpath([root, path]) != root:
            raise ValueError(f"line {line}: {shorten(file)} is not below data.root, {root}")
        if not os.path.isfile(path):
            rule = f"there is no file {shorten(path, 300)} (below data.root)"
            raise ValueError(f"line {line}: {rule}")
        directory, name = os.path.split(path)
        is_link = os.path.islink(path)
        real_path = os.path.realpath(path) if is_link else f"{real_directory(directory)}/{name}"
        if (first := seen.setdefault(real_path, line)) != line:
            rule = f"name one file, {shorten(real_path, 300)}, which has one label and one split"
            raise ValueError(f"lines {first} and {line} {rule}: {shorten(file)}")
        files[split].append((path, label))
    return files


def _open_folders(
    section: ImageFolderData, left_out: Counter[str]
) -> dict[SourceSplit, ImageFiles]:
    """Return the training and the test set, and a third set, if there is a folder `test` too."""
    seen: dict[str, str] = {}
    root = Path(section.root).expanduser()

    def open_folder(field: str) -> ImageFiles:
        if not (folder := root / getattr(section, field)).is_dir():
            rule = "image_folder needs data.root/<split>/<class>/<image files>, on every node"
            raise DataError(f"data.{field}", f"there is no folder {folder.absolute()}; {rule}")
        try:
            return list_folder(folder, left_out, seen)
        except OSError as error:
            raise DataError(f"data.{field}", f"{folder} has no usable images: {error}") from error

    train, test = open_folder("train_split"), open_folder("test_split")
    if odd := set(train.classes) ^ set(test.classes):
        rule = f"{section.train_split} and {section.test_split} must have the same class folders; "
        rule += f"only one of them has: {first_of(sorted(odd))}; if the test set has no labels, "
        rule += "move it away: init then takes a fifth of the training set as test set"
        raise DataError("data.root", rule)
    folders: dict[SourceSplit, ImageFiles] = {"train": train, "test": test}
    if _has_third_folder(section):
        try:
            final = list_folder(root / "test", left_out, seen)
        except FileNotFoundError:  # without labels
            return folders
        except OSError as error:
            raise DataError("data.root", str(error)) from error
        if final.classes == train.classes:
            folders["final"] = final
    return folders


def _has_third_folder(section: ImageFolderData) -> bool:
    is_free = "test" not in (section.train_split, section.test_split)
    return is_free and (Path(section.root).expanduser() / "test").is_dir()
