"""Sets that fit in memory, read as numpy arrays once, in the driver, and checked there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raytrain_opt.config.schema import ArraysData, ArraySetData
from raytrain_opt.data.order import Purpose, generator
from raytrain_opt.errors import DataError

Array = npt.NDArray[Any]

# name -> (class in torchvision.datasets, its folder below the root)
_TORCHVISION_SETS = {
    "mnist": ("MNIST", "MNIST/raw"),
    "fashion_mnist": ("FashionMNIST", "FashionMNIST/raw"),
    "cifar10": ("CIFAR10", "cifar-10-batches-py"),
    "cifar100": ("CIFAR100", "cifar-100-python"),
}
_ROWS_PER_CHUNK = 1024
_DIGITS_TEST_FRACTION = 0.2


@dataclass(frozen=True, eq=False)
class Arrays:
    """A whole set. Images: uint8 [N, H, W, C]; anything else: float32 [N, ...].

    Labels: int64 [N], 0 .. num_classes - 1. The arrays may be read-only and shared.
    """

    train_x: Array
    train_y: npt.NDArray[np.int64]
    test_x: Array
    test_y: npt.NDArray[np.int64]
    num_classes: int


def load_arrays(section: ArraySetData | ArraysData) -> Arrays:
    """Read and check the set of a job. Raises DataError naming the file or field at fault."""
    if isinstance(section, ArraysData):
        return _load_files(section)
    if section.name == "digits":
        return _load_digits()
    return _load_torchvision(section)


def _load_digits() -> Arrays:
    """scikit-learn's 1,797 digits, 8x8, as 0..255; a fixed fifth of each class is the test."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    y = digits.target.astype(np.int64)
    test = np.zeros(len(y), dtype=bool)
    order = generator(0, Purpose.DIGITS_SPLIT).permutation(len(y))
    for label in range(10):
        of_class = order[y[order] == label]
        test[of_class[: round(_DIGITS_TEST_FRACTION * len(of_class))]] = True
    return checked_arrays((x[~test], y[~test]), (x[test], y[test]), 10)


def _load_torchvision(section: ArraySetData) -> Arrays:
    """CIFAR and MNIST through torchvision, which compares the MD5 sum of what it fetches, and
    that of CIFAR's files, which are pickles, before it reads them.
    """
    import torchvision.datasets

    class_name, folder = _TORCHVISION_SETS[section.name]
    root = Path(section.root).expanduser()
    try:
        parts = [
            getattr(torchvision.datasets, class_name)(root, train=train, download=section.download)
            for train in (True, False)
        ]
    except Exception as error:  # torchvision's readers meet damage with errors of every kind
        state = (
            "could not be fetched"
            if section.download
            else "is not there, or is damaged; put it there, or have it fetched with "
            "data.download: true"
        )
        raise DataError(
            f"data.name: {section.name} was looked for in {root / folder} and {state}: "
            f"{error or type(error).__name__}"
        ) from error
    train, test = ((np.asarray(p.data), np.asarray(p.targets, dtype=np.int64)) for p in parts)
    return checked_arrays(train, test, len(parts[0].classes))


def _load_files(section: ArraysData) -> Arrays:
    train, test = (
        tuple(_read_npy(path, f"data.{field}.{place}") for place, path in enumerate(paths))
        for field, paths in (("train", section.train), ("test", section.test))
    )
    return checked_arrays(
        (train[0], train[1]),
        (test[0], test[1]),
        section.num_classes,
        names=(_places("data.train", section.train), _places("data.test", section.test)),
    )


def _places(field: str, pair: tuple[str, str]) -> tuple[str, str]:
    """Each file as a person finds it: its place in the job, and its name."""
    return f"{field}.0: {pair[0]}", f"{field}.1: {pair[1]}"


def _read_npy(path: str, field: str) -> Array:
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"{field}: there is no file {file.absolute()}; write it with numpy.save")
    try:
        with file.open("rb") as opened:
            array = np.load(opened, allow_pickle=False)
    except Exception as error:  # a damaged header can make numpy raise anything
        raise DataError(
            f"{field}: {file} is not a .npy file of plain numbers (arrays of Python objects "
            f"are refused, they can run code): {error}"
        ) from error
    if not isinstance(array, np.ndarray):
        raise DataError(f"{field}: {file} is an .npz archive; give each array as a .npy file")
    return array


Pair = tuple[Array, Array]
Names = tuple[tuple[str, str], tuple[str, str]]
_NAMES: Names = (
    ("data.name: train_x", "data.name: train_y"),
    ("data.name: test_x", "data.name: test_y"),
)


def checked_arrays(
    train: Pair, test: Pair, num_classes: int | None, names: Names = _NAMES
) -> Arrays:
    """The pairs (x, y) in the types that `Arrays` promises; `names` begin the errors.

    Raises DataError: empty, lengths differ, labels that are no class numbers, values that are
    no finite numbers, samples of train and test of different shapes.
    """
    if num_classes is None:
        _check_labels(train[1], names[0][1])
        num_classes = int(train[1].max()) + 1
    for (x, y), (name_x, name_y) in zip((train, test), names, strict=True):
        _check_labels(y, name_y, num_classes)
        if len(x.shape) == 0 or len(x) != len(y):
            raise DataError(
                f"{name_x} has shape {x.shape}, its labels have shape {y.shape} "
                f"({_file(name_y)}); both need the same number of samples (first axis)"
            )
    train_x, test_x = _checked_values(train[0], names[0][0]), _checked_values(test[0], names[1][0])
    if train_x.shape[1:] != test_x.shape[1:] or train_x.dtype != test_x.dtype:
        raise DataError(
            f"{names[1][0]}: its samples are {test[0].dtype} {test_x.shape[1:]}, those of "
            f"{_file(names[0][0])} {train[0].dtype} {train_x.shape[1:]}; they must be alike"
        )
    labels = [np.ascontiguousarray(y, dtype=np.int64) for y in (train[1], test[1])]
    return Arrays(train_x, labels[0], test_x, labels[1], num_classes)


def _file(name: str) -> str:
    return name.partition(": ")[2]


def _check_labels(y: Array, name: str, num_classes: int | None = None) -> None:
    if not np.issubdtype(y.dtype, np.integer) or y.ndim != 1:
        raise DataError(
            f"{name} holds {y.dtype} of shape {y.shape}; labels must be whole class numbers of "
            "shape [samples]"
        )
    if len(y) == 0:
        raise DataError(f"{name} has no samples")
    wrong = (y < 0) if num_classes is None else (y < 0) | (y >= num_classes)
    if wrong.any():
        place = int(wrong.argmax())
        highest = "" if num_classes is None else f" to {num_classes - 1} (data.num_classes)"
        raise DataError(
            f"{name} has {int(wrong.sum())} labels outside 0{highest or ' and up'}; the first is "
            f"{y[place]}, of sample {place}"
        )


def _checked_values(x: Array, name: str) -> Array:
    if not (np.issubdtype(x.dtype, np.number) or x.dtype == bool) or np.iscomplexobj(x):
        raise DataError(f"{name} is of type {x.dtype}; it must hold real numbers")
    if x.ndim < 2 or x[0].size == 0:
        raise DataError(f"{name} has shape {x.shape}; it must be [samples, ...], not empty")
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        return _as_images(x, name)
    values = np.ascontiguousarray(x, dtype=np.float32)
    wrong = sum(
        int(np.count_nonzero(~np.isfinite(values[start : start + _ROWS_PER_CHUNK])))
        for start in range(0, len(values), _ROWS_PER_CHUNK)
    )
    if wrong:
        raise DataError(f"{name} has {wrong} values that are not finite (NaN or infinite)")
    return values


def _as_images(x: Array, name: str) -> Array:
    """uint8 [N, H, W] or [N, H, W, C] as [N, H, W, C]."""
    if x.ndim == 3:
        x = x[..., np.newaxis]
    if x.shape[1] in (1, 3) and x.shape[3] > 4:
        raise DataError(
            f"{name} has shape {x.shape}, which looks like channels first; uint8 images "
            "must be [samples, height, width, channels]: x.transpose(0, 2, 3, 1)"
        )
    return np.ascontiguousarray(x)
