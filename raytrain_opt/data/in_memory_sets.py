"""Data sets that fit in memory: read as numpy arrays once, in the driver, and checked there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raytrain_opt.config.data import ArraysData, ArraySetData
from raytrain_opt.data.base import (
    DataSource,
    SourceSplit,
    channel_axis,
    column_note,
    digest,
    layout_note,
)
from raytrain_opt.data.sampling import Indices, Purpose, generator
from raytrain_opt.errors import DataError

if TYPE_CHECKING:
    from raytrain_opt.data.transforms import MeanStd

Array = npt.NDArray[Any]

# name -> (class in torchvision.datasets, folder of its files below the root)
_TORCHVISION_SETS = {
    "mnist": ("MNIST", "MNIST/raw"),
    "fashion_mnist": ("FashionMNIST", "FashionMNIST/raw"),
    "cifar10": ("CIFAR10", "cifar-10-batches-py"),
    "cifar100": ("CIFAR100", "cifar-100-python"),
}
# A second or two.
DIGEST_BYTES = 2**30
_DIGITS_TEST_FRACTION = 0.2


@dataclass(eq=False)
class DatasetArrays(DataSource):
    """A data set as arrays, which may be read-only and shared with other processes.

    Images: uint8 [N, H, W, C]; anything else: float32 [N, ...]. Labels: int64 [N], below
    `num_classes`.
    """

    train_x: Array
    train_y: npt.NDArray[np.int64]
    test_x: Array
    test_y: npt.NDArray[np.int64]
    num_classes: int
    class_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    field: str = "data.name"

    def __post_init__(self) -> None:
        """Derive what all sources have."""
        shape, self.labels = self.train_x.shape[1:], self.train_y
        self.is_image = self.train_x.dtype == np.uint8
        self.sample_shape = (shape[2], *shape[:2]) if self.is_image else shape

    def size(self, split: SourceSplit) -> int:
        """Return the number of samples."""
        return len(self.train_x if split == "train" else self.test_x)

    def mean_std(self, samples: Indices) -> MeanStd | None:
        """Return mean and deviation of each channel of these images."""
        from raytrain_opt.data.transforms import channel_mean_std

        return channel_mean_std(self.train_x, samples) if self.is_image else None

    def digest(self) -> str:
        """Return a digest of labels and values; of more than a GiB, of samples evenly spread."""
        xs, labels = (self.train_x, self.test_x), (self.train_y, self.test_y)
        every = (x[:: 1 + x.nbytes // DIGEST_BYTES] for x in xs)
        return digest(np.ascontiguousarray(part).data for part in (*labels, *every))


def load_array_set(section: ArraySetData) -> DatasetArrays:
    """Read and check a public data set. Raises DataError that names its folder."""
    return _load_digits() if section.name == "digits" else _load_torchvision(section)


def read_digits() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return the images [1797, 8, 8], 0..255, and labels of handwritten digits.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine
    Learning Repository, 1998 (CC BY 4.0): its test set, as scikit-learn ships it.
    """
    table = np.loadtxt(Path(__file__).parent / "digits.csv.gz", np.int64, delimiter=",")
    images = np.rint(table[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    return images, table[:, -1]


def _load_digits() -> DatasetArrays:
    """Return the digits; a fifth of each class is the test set."""
    x, y = read_digits()
    is_test = np.zeros(len(y), dtype=bool)
    order = generator(0, Purpose.DIGITS_SPLIT).permutation(len(y))
    for label in range(10):
        of_class = order[y[order] == label]
        is_test[of_class[: round(_DIGITS_TEST_FRACTION * len(of_class))]] = True
    train, test = pair("train", x[~is_test], y[~is_test]), pair("test", x[is_test], y[is_test])
    return validate_arrays(train, test, tuple(map(str, range(10))))


def _load_torchvision(section: ArraySetData) -> DatasetArrays:
    """Read CIFAR or MNIST through torchvision, which checks the MD5 sums of CIFAR's pickles."""
    import torchvision.datasets

    class_name, folder = _TORCHVISION_SETS[section.name]
    root = Path(section.root).expanduser()
    try:
        splits = [
            getattr(torchvision.datasets, class_name)(root, train=train, download=section.download)
            for train in (True, False)
        ]
    except Exception as error:  # torchvision raises errors of every kind for damaged files
        cause = "is missing or damaged; put the files there, or set data.download: true"
        if section.download:
            cause = "could not be downloaded"
        rule = f"{section.name} in {root / folder} {cause}: {error or type(error).__name__}"
        raise DataError("data.name", rule) from error
    train, test = (
        pair(name, np.asarray(split.data), np.asarray(split.targets, dtype=np.int64))
        for name, split in zip(("train", "test"), splits, strict=True)
    )
    return validate_arrays(train, test, tuple(map(str, splits[0].classes)))


def load_arrays(section: ArraysData) -> DatasetArrays:
    """Read and check the files of a job. Raises DataError that names the file."""
    train, test = (
        (_read_npy(paths[0], f"data.{field}.0"), _read_npy(paths[1], f"data.{field}.1"))
        for field, paths in (("train", section.train), ("test", section.test))
    )
    arrays = validate_arrays(train, test)
    if section.normalize == "auto":
        arrays.notes += column_note(train[0].name, train[0].values)
    return arrays


def _read_npy(path: str, field: str) -> NamedArray:
    if not (file := Path(path).expanduser()).is_file():
        raise DataError(field, f"there is no file {file.absolute()}; write it with numpy.save")
    try:
        with file.open("rb") as stream:  # numpy.load would take other formats, too
            array = np.lib.format.read_array(stream, allow_pickle=False)
    except Exception as error:  # a damaged header can make numpy raise anything
        rule = "is not a .npy file of plain numbers, written with numpy.save"
        raise DataError(field, f"{file} {rule}: {error}") from error
    return NamedArray(array, field, path)


class NamedArray(NamedTuple):
    """An array with the field of the job that names it, and its file or part, for errors."""

    values: Array
    field: str
    name: str

    def error(self, rule: str) -> DataError:
        """Return the error that the array breaks this rule."""
        return DataError(self.field, f"{self.name} {rule}")


def pair(split: str, x: Array, y: Array) -> tuple[NamedArray, NamedArray]:
    """Return samples and labels of a split of a data set that has a name of its own."""
    return NamedArray(x, "data.name", f"{split}_x"), NamedArray(y, "data.name", f"{split}_y")


def validate_arrays(
    train: tuple[NamedArray, NamedArray],
    test: tuple[NamedArray, NamedArray],
    class_names: tuple[str, ...] = (),
) -> DatasetArrays:
    """Return samples and labels in the types of `DatasetArrays`.

    Raises DataError: x and y differ in length, labels are not class indices, values are not finite
    numbers, samples of train and test differ in shape or type.
    """
    train, test = ((x, _without_axis(y)) for x, y in (train, test))
    check_labels(train[1])
    num_classes = len(class_names) or int(train[1].values.max()) + 1
    for x, y in (train, test):
        check_labels(y, num_classes)
        if x.values.ndim == 0 or len(x.values) != len(y.values):
            raise x.error(
                f"has shape {x.values.shape}, its labels have shape {y.values.shape} "
                f"({y.name}); both need the same number of samples (first axis)"
            )
    train_x, test_x = convert_values(train[0]), convert_values(test[0])
    if train_x.shape[1:] != test_x.shape[1:] or train_x.dtype != test_x.dtype:
        others = f"those of {train[0].name} are {train_x.dtype} {train_x.shape[1:]}"
        raise test[0].error(f"has samples {test_x.dtype} {test_x.shape[1:]}, but {others}")
    labels = [np.ascontiguousarray(y.values, dtype=np.int64) for y in (train[1], test[1])]
    images = [x for x, _ in (train, test) if x.values.dtype == np.uint8 and x.values.ndim == 4]
    notes = tuple(layout_note(x.name, x.values.shape[1:], -1) for x in images if not class_names)
    arrays = (train_x, labels[0], test_x, labels[1])
    return DatasetArrays(*arrays, num_classes, class_names, notes, train[1].field)


def _without_axis(y: NamedArray) -> NamedArray:
    """Return labels of shape [samples, 1], as Keras has them, as [samples]."""
    return y._replace(values=y.values[:, 0]) if y.values.shape[1:] == (1,) else y


def check_labels(array: NamedArray, num_classes: float = math.inf) -> None:
    """Raise DataError unless these are class indices below `num_classes`."""
    y = array.values
    if not np.issubdtype(y.dtype, np.integer) or y.ndim != 1 or len(y) == 0:
        rule = "labels must be integer class indices of shape [samples], one or more"
        raise array.error(f"has type {y.dtype} and shape {y.shape}; {rule}")
    if (is_wrong := (y < 0) | (y >= num_classes)).any():
        first = int(is_wrong.argmax())
        rule = f"has {is_wrong.sum()} labels below 0 or above the classes of the training set"
        raise array.error(f"{rule}; the first is {y[first]}, of sample {first}")


def convert_values(array: NamedArray) -> Array:
    """Return uint8 [N, H, W], [N, H, W, C] or [N, C, H, W] as [N, H, W, C]; others as float32.

    Raises DataError for values that are not finite numbers.
    """
    x = array.values
    if not (np.issubdtype(x.dtype, np.number) or x.dtype == bool) or np.iscomplexobj(x):
        raise array.error(f"has type {x.dtype}; it must hold real numbers")
    if x.ndim < 2 or x[0].size == 0:
        raise array.error(f"has shape {x.shape}; it must be [samples, ...], not empty")
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        x = x[..., np.newaxis] if x.ndim == 3 else x
        is_first = channel_axis(x.shape[1:], default=-1) == 0
        return np.ascontiguousarray(x.transpose(0, 2, 3, 1) if is_first else x)
    values = np.ascontiguousarray(x, dtype=np.float32)
    if not_finite := np.count_nonzero(~np.isfinite(values)):
        raise array.error(f"has {not_finite} values that are not finite (NaN or infinite)")
    return values
