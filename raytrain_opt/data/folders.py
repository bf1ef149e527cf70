"""Trees of image files: root/<split>/<class>/<file>, as ImageNet is laid out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from raytrain_opt.config.schema import ImageFolderData
from raytrain_opt.data.loading import Part, Sample
from raytrain_opt.errors import DataError

if TYPE_CHECKING:
    from torchvision.datasets import ImageFolder

# The usual evaluation crop: 224 out of a shorter side of 256.
_RESIZE_RATIO = 256 / 224


class FolderSource:
    """Images of two folders as uint8 [image_size, image_size, 3]; greyscale becomes RGB.

    Raises DataError: a folder, or a class in one of them, is missing or empty.
    """

    def __init__(self, section: ImageFolderData) -> None:
        self._folders: dict[Part, ImageFolder] = {
            "train": _open(section, section.train_split, "data.train_split"),
            "test": _open(section, section.test_split, "data.test_split"),
        }
        _check_classes(self._folders["train"], self._folders["test"])
        self._augmented, self._plain = _transforms(section.image_size)
        self.num_classes = len(self._folders["train"].classes)

    def size(self, part: Part) -> int:
        """Number of files."""
        return len(self._folders[part].samples)

    def read(self, part: Part, index: int, augment: bool) -> Sample:
        """Random crop and mirror when `augment`, else the centre. Decoding errors pass through."""
        folder = self._folders[part]
        path, label = folder.samples[index]
        image = (self._augmented if augment else self._plain)(folder.loader(path))
        return torch.from_numpy(np.array(image)), label

    def describe(self, part: Part, index: int) -> str:
        """File and class."""
        folder = self._folders[part]
        path, label = folder.samples[index]
        return f"data.root: {path} (class {folder.classes[label]}) cannot be read"


def _open(section: ImageFolderData, split: str, field: str) -> ImageFolder:
    from torchvision.datasets import ImageFolder

    folder = Path(section.root).expanduser() / split
    if not folder.is_dir():
        raise DataError(
            f"{field}: there is no folder {folder.absolute()}; image_folder needs "
            "data.root/<split>/<class>/<image files>, on every node"
        )
    try:
        return ImageFolder(folder)
    except OSError as error:
        raise DataError(f"{field}: {folder} holds no usable images: {error}") from error


def _check_classes(train: ImageFolder, test: ImageFolder) -> None:
    if train.classes != test.classes:
        only = sorted(set(train.classes) ^ set(test.classes))
        shown = ", ".join(only[:5]) + (", …" if len(only) > 5 else "")
        raise DataError(
            f"data.root: {train.root} and {test.root} must have the same class folders; "
            f"in one of them only: {shown}"
        )


def _transforms(size: int) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """(for training, for evaluation), on PIL images, which are cropped before they are resized."""
    from torchvision.transforms import v2

    augmented = v2.Compose([v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()])
    plain = v2.Compose(
        [v2.Resize(round(size * _RESIZE_RATIO), antialias=True), v2.CenterCrop(size)]
    )
    return augmented, plain
