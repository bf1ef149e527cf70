"""Image files: root/<split>/<class>/<file>, the layout of ImageNet, or listed in a CSV file."""

from __future__ import annotations

import csv
import os
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from io import BytesIO, StringIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from raytrain_opt import storage
from raytrain_opt.config.data import ImageFolderData
from raytrain_opt.data.batch_reader import Sample, SourceSplit
from raytrain_opt.data.images import center_crop, random_crop
from raytrain_opt.data.sampling import Indices
from raytrain_opt.data.transforms import IMAGENET_MEAN_STD, MeanStd
from raytrain_opt.errors import DataError, StorageError

# Of the CSV file.
COLUMNS = ("file", "label", "split")
_CACHE = "~/.cache/raytrain_opt/files"
# Fewer are listed in a moment, and many small folders are soon gone.
_MIN_CACHED_FILES = 10_000
# A folder that changes twice within the resolution of its time has one time for both: 2 s on FAT.
_TIME_RESOLUTION_NS = 2_000_000_000
# Pillow's modes of images without colors.
_GRAY_MODES = ("1", "L", "LA", "I", "I;16", "F")


class ImageFolderSource:
    """Images of two folders as uint8 [image_size, image_size, 3]; grayscale becomes RGB.

    Raises DataError: a folder, a class in one of them or a file of the CSV file is missing, or
    the training set lacks a class, perhaps because all its images are gray.
    """

    field = "data.root"
    is_image = True
    mean_std: MeanStd | None = IMAGENET_MEAN_STD

    def __init__(self, section: ImageFolderData) -> None:
        if section.labels is not None:
            self._folders = _read_labels(section, section.labels)
        else:
            train = _open(section, section.train_split, "data.train_split")
            test = _open(section, section.test_split, "data.test_split")
            if train.classes != test.classes:
                rule = (
                    f"{section.train_split} and {section.test_split} below {section.root} must "
                    "have the same class folders; only one of them has: "
                    f"{_names(set(train.classes) ^ set(test.classes))}"
                )
                raise DataError(self.field, rule)
            self._folders = {"train": train, "test": test}
        if section.color_only:
            self._folders = {split: _in_color(files) for split, files in self._folders.items()}
            train = self._folders["train"]
            lost = np.setdiff1d(np.arange(len(train.classes)), train.labels)
            gray = [f"class {train.classes[i]} of the training set" for i in lost]
            gray += [] if self.size("test") else ["the test set"]
            if gray:
                raise DataError("data.color_only", f"leaves no image of {gray[0]}: all are gray")
        self._size, self._random_crop = section.image_size, section.random_crop
        self.class_names = tuple(self._folders["train"].classes)
        self.num_classes = len(self.class_names)
        self.labels: Indices = self._folders["train"].labels
        self.sample_shape = (3, section.image_size, section.image_size)

    def size(self, split: SourceSplit) -> int:
        """Return the number of files."""
        return len(self._folders[split])

    def read(self, split: SourceSplit, index: int, augment: bool) -> Sample:
        """Return a random crop, perhaps mirrored, when `augment` and the job agree, or the center.

        Decoding errors pass through.
        """
        crop = random_crop if augment and self._random_crop else center_crop
        label = int(self._folders[split].labels[index])
        return crop(self.content(split, index), self._size), label

    def content(self, split: SourceSplit, index: int) -> bytes:
        """Return the image file."""
        return storage.read_file(Path(self._folders[split][index][0]))

    def describe(self, split: SourceSplit, index: int) -> str:
        """Return the file and its class, for an error message."""
        folder = self._folders[split]
        path, label = folder[index]
        return f"{path} (class {folder.classes[label]}) cannot be read"


class ImageFiles:
    """Files of a set, and the class of each: `labels`, indices of `classes`.

    The paths are one array of bytes: 1.3 million objects would take 243 MiB, which every loader
    process would copy by counting references. As arrays they also lie in the memory of a node
    once, in Ray's object store.
    """

    def __init__(
        self,
        classes: Sequence[str],
        paths: npt.NDArray[np.uint8],
        ends: Indices,
        labels: Indices,
    ) -> None:
        self.classes, self.paths, self.ends, self.labels = classes, paths, ends, labels

    @classmethod
    def of(cls, classes: Sequence[str], files: Iterable[tuple[str, int]]) -> ImageFiles:
        """Return these paths and numbers of classes as arrays."""
        paths, ends, labels = bytearray(), array("q"), array("q")
        for path, label in files:
            paths += os.fsencode(path)
            ends.append(len(paths))
            labels.append(label)
        path_bytes = np.frombuffer(paths, np.uint8)
        return cls(classes, path_bytes, np.asarray(ends), np.asarray(labels))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> tuple[str, int]:
        start = self.ends[index - 1] if index else 0
        path = self.paths[start : self.ends[index]].tobytes()
        return os.fsdecode(path), int(self.labels[index])


def list_folder(folder: Path) -> ImageFiles:
    """List files and classes of a folder, in the order of torchvision's ImageFolder.

    Links are followed, but not those to a folder within a class, which may lead back to itself
    and repeat all files. A long list is kept in the user's cache folder, with the time at which
    each directory last changed, and used until one of them has changed. Raises OSError.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS

    folder = folder.absolute()
    key = blake2b(os.fsencode(f"{folder} {IMG_EXTENSIONS}"), digest_size=12).hexdigest()
    kept = _read_list(f"{key}.npz")
    if kept is not None:
        return kept
    started_ns = time.time_ns()
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    if not classes:
        raise FileNotFoundError("it has no folder of a class")
    directories = [str(folder)]
    pairs = (
        (path, i)
        for i, name in enumerate(classes)
        for path in image_paths(folder / name, directories)
    )
    files = ImageFiles.of(classes, pairs)
    counts = np.bincount(files.labels, minlength=len(classes))
    if not counts.all():
        raise FileNotFoundError(f"class {classes[int(counts.argmin())]} has no image file")
    changed_ns = _changed_ns(directories)
    is_settled = changed_ns.max() < started_ns - _TIME_RESOLUTION_NS
    if len(files) >= _MIN_CACHED_FILES and is_settled and not _is_fuse(folder):
        _keep_list(f"{key}.npz", files, directories, changed_ns)
    return files


def _in_color(files: ImageFiles) -> ImageFiles:
    every = (files[index] for index in range(len(files)))
    return ImageFiles.of(files.classes, (file for file in every if _has_colors(file[0])))


def _has_colors(path: str) -> bool:
    try:
        with Image.open(path) as image:  # reads the header only
            return image.mode not in _GRAY_MODES
    except OSError:  # a damaged file is reported, or skipped, when it is read
        return True


def image_paths(folder: Path, directories: list[str] | None = None) -> Iterator[str]:
    """Yield the image files below a folder, sorted, by their suffix; append its `directories`."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    for directory, _, files in sorted(os.walk(folder)):
        if directories is not None:
            directories.append(directory)
        for file in sorted(files):
            if file.lower().endswith(IMG_EXTENSIONS):
                yield f"{directory}/{file}"


def _keep_list(name: str, files: ImageFiles, directories: list[str], changed_ns: Indices) -> None:
    names = (
        np.frombuffer(os.fsencode("\0".join(n)), np.uint8) for n in (files.classes, directories)
    )
    stream = BytesIO()
    np.savez(stream, *names, changed_ns, files.paths, files.ends, files.labels)
    with suppress(StorageError):  # without it, the next run lists the files again
        storage.write(_CACHE, name, stream.getvalue())


def _read_list(name: str) -> ImageFiles | None:
    """Return a list that was kept, unless a directory has changed or the list is damaged."""
    try:
        path = Path(_CACHE).expanduser() / name
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            classes, directories, changed_ns, paths, ends, labels = (file[k] for k in file.files)
        names = [os.fsdecode(part.tobytes()).split("\0") for part in (classes, directories)]
        is_current = np.array_equal(_changed_ns(names[1]), changed_ns)
    except Exception:  # noqa: BLE001 - whatever numpy raises for a damaged file
        return None
    return ImageFiles(names[0], paths, ends, labels) if is_current else None


def _changed_ns(directories: Sequence[str]) -> Indices:
    """Return when each directory changed; programs that unpack or copy set its other time back."""
    return np.array([os.stat(directory).st_ctime_ns for directory in directories])


def _is_fuse(folder: Path) -> bool:
    """Return whether a program serves the folder's file system.

    Those of object storages do not know when a directory changed.
    """
    mounts, device = Path("/proc/self/mountinfo"), folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = mounts.read_text().splitlines() if mounts.exists() else []
    kinds = [line.partition(" - ")[2] for line in lines if line.split()[2] == number]
    return any(kind.startswith("fuse") for kind in kinds)


def _read_labels(section: ImageFolderData, path: str) -> dict[SourceSplit, ImageFiles]:
    """Read the files of both sets from the CSV file `data.labels`."""

    def error(rule: str) -> DataError:
        return DataError("data.labels", f"{path} {rule}")

    try:
        content = storage.read(*storage.split(path))
    except StorageError as cause:
        raise DataError("data.labels", str(cause)) from cause
    if content is None:
        raise error("does not exist")
    try:
        rows = csv.DictReader(StringIO(content.decode("utf-8-sig"), newline=""))
    except UnicodeDecodeError as cause:
        raise error(f"is not UTF-8 text: {cause}") from cause
    if not set(COLUMNS) <= set(rows.fieldnames or ()):
        header = ", ".join(rows.fieldnames or ())
        raise error(f"needs a first line with the names file, label and split; it has {header}")
    root = Path(section.root).expanduser().absolute()
    files: dict[str, list[tuple[str, str]]] = {"train": [], "test": []}
    for row in rows:
        file, label, split = (row[name] or "" for name in COLUMNS)
        if split not in files or not label:
            rule = "needs a label, and the split train or test"
            raise error(f"line {rows.line_num}: {file} {rule}; it has {label!r}, {split!r}")
        if not (root / file).is_file():
            raise error(f"line {rows.line_num}: there is no file {root / file} (below data.root)")
        files[split].append((str(root / file), label))
    for split, of_split in files.items():
        if not of_split:
            raise error(f"has no file of split {split}")
    classes = sorted({label for _, label in files["train"]})
    numbers = {name: number for number, name in enumerate(classes)}
    if unknown := {label for _, label in files["test"]} - numbers.keys():
        raise error(f"has labels that only test files have: {_names(unknown)}")
    train, test = (
        ImageFiles.of(classes, ((file, numbers[label]) for file, label in files[split]))
        for split in ("train", "test")
    )
    return {"train": train, "test": test}


def _open(section: ImageFolderData, split: str, field: str) -> ImageFiles:
    folder = Path(section.root).expanduser() / split
    if not folder.is_dir():
        rule = "image_folder needs data.root/<split>/<class>/<image files>, on every node"
        raise DataError(field, f"there is no folder {folder.absolute()}; {rule}")
    try:
        return list_folder(folder)
    except OSError as error:
        raise DataError(field, f"{folder} has no usable images: {error}") from error


def _names(classes: set[str]) -> str:
    return ", ".join(sorted(classes)[:5]) + (", …" if len(classes) > 5 else "")
