"""Folders of image files: root/<split>/<class>/<file>, the layout of ImageNet."""

from __future__ import annotations

import os
from array import array
from pathlib import Path

import numpy as np

from raytrain_opt.config.data import ImageFolderData
from raytrain_opt.data.batch_reader import Sample, SourceSplit
from raytrain_opt.data.images import center_crop, random_crop
from raytrain_opt.data.transforms import IMAGENET_MEAN_STD, MeanStd
from raytrain_opt.errors import DataError


class ImageFolderSource:
    """Images of two folders as uint8 [image_size, image_size, 3]; grayscale becomes RGB.

    Raises DataError: a folder, or a class in one of them, is missing or empty.
    """

    field = "data.root"
    is_image = True
    mean_std: MeanStd | None = IMAGENET_MEAN_STD

    def __init__(self, section: ImageFolderData) -> None:
        self._folders: dict[SourceSplit, ImageFiles] = {
            "train": _open(section, section.train_split, "data.train_split"),
            "test": _open(section, section.test_split, "data.test_split"),
        }
        _check_classes(self._folders["train"], self._folders["test"])
        self._size, self._random_crop = section.image_size, section.random_crop
        self.class_names = tuple(self._folders["train"].classes)
        self.num_classes = len(self.class_names)
        self.sample_shape = (3, section.image_size, section.image_size)

    def size(self, split: SourceSplit) -> int:
        """Return the number of files."""
        return len(self._folders[split])

    def read(self, split: SourceSplit, index: int, augment: bool) -> Sample:
        """Return a random crop, perhaps mirrored, when `augment` and the job agree, or the center.

        Decoding errors pass through.
        """
        path, label = self._folders[split][index]
        content = Path(path).read_bytes()
        crop = random_crop if augment and self._random_crop else center_crop
        return crop(content, self._size), label

    def describe(self, split: SourceSplit, index: int) -> str:
        """Return the file and its class, for an error message."""
        folder = self._folders[split]
        path, label = folder[index]
        return f"{path} (class {folder.classes[label]}) cannot be read"


class ImageFiles:
    """Files and classes of one folder, in the order of torchvision's ImageFolder.

    The paths are one array of bytes: 1.3 million objects would take 243 MiB, which every loader
    process would copy by counting references. As arrays they also lie in the memory of a node
    once, in Ray's object store. Links are followed, but not those to a folder within a class,
    which may lead back to itself and repeat all files. Raises OSError.
    """

    def __init__(self, folder: Path) -> None:
        from torchvision.datasets.folder import IMG_EXTENSIONS

        self.root = folder
        self.classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        paths, ends, labels = bytearray(), array("q"), array("q")
        for label, name in enumerate(self.classes):
            first = len(paths)
            for directory, _, files in sorted(os.walk(folder / name)):
                for file in sorted(files):
                    if file.lower().endswith(IMG_EXTENSIONS):
                        paths += os.fsencode(f"{directory}/{file}")
                        ends.append(len(paths))
                        labels.append(label)
            if len(paths) == first:
                raise FileNotFoundError(f"class {name} has no file {', '.join(IMG_EXTENSIONS)}")
        if not self.classes:
            raise FileNotFoundError("it has no folder of a class")
        self._paths = np.frombuffer(paths, np.uint8)
        self._ends, self._labels = np.asarray(ends), np.asarray(labels)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> tuple[str, int]:
        start = self._ends[index - 1] if index else 0
        path = self._paths[start : self._ends[index]].tobytes()
        return os.fsdecode(path), int(self._labels[index])


def _open(section: ImageFolderData, split: str, field: str) -> ImageFiles:
    folder = Path(section.root).expanduser() / split
    if not folder.is_dir():
        raise DataError(
            field,
            f"there is no folder {folder.absolute()}; image_folder needs "
            "data.root/<split>/<class>/<image files>, on every node",
        )
    try:
        return ImageFiles(folder)
    except OSError as error:
        raise DataError(field, f"{folder} has no usable images: {error}") from error


def _check_classes(train: ImageFiles, test: ImageFiles) -> None:
    if train.classes != test.classes:
        different = sorted(set(train.classes) ^ set(test.classes))
        names = ", ".join(different[:5]) + (", …" if len(different) > 5 else "")
        raise DataError(
            "data.root",
            f"{train.root} and {test.root} must have the same class folders; "
            f"only one of them has: {names}",
        )
