"""Ray Datasets of the user's own, executed once and read in windows of neighboring rows.

The driver calls the user's function and executes its Datasets. Their blocks stay in Ray's object
store, where all processes iterate over them by `iter_torch_batches`. A row's number is its
position in the Dataset. An epoch shuffles rows within windows, so that a process reads forward
and holds few windows. Nothing here imports Ray: the Datasets bring it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raytrain_opt.config.data import RayData
from raytrain_opt.data.batch_reader import SourceSplit, cause
from raytrain_opt.data.in_memory_sets import (
    Array,
    DatasetArrays,
    NamedArray,
    check_labels,
    convert_values,
)
from raytrain_opt.data.sampling import Indices
from raytrain_opt.data.user_datasets import call_data_function
from raytrain_opt.errors import DataError

# Passes over a Dataset that stay open: one of the training, one of the validation split.
_MAX_PASSES = 2


class WindowedRows:
    """The samples of a Dataset, read like a numpy array of this shape and dtype.

    Rows in ascending order cost one pass over the Dataset; an earlier row begins another pass.
    Raises DataError: a value is not a number or not finite, or samples differ in shape or type.
    """

    def __init__(self, dataset: Any, column: str, window: int, name: str) -> None:
        self._dataset, self._column, self._name = dataset, column, name
        self.window = window
        self._passes: list[_Pass] = []
        first = self._convert(next(self._batches(1), np.empty(0)))
        self.shape: tuple[int, ...] = (dataset.count(), *first.shape[1:])
        self.dtype = first.dtype
        self.nbytes = self.shape[0] * first.nbytes

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process reads the rows from."""
        return {**self.__dict__, "_passes": []}

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.shape[0]

    def __getitem__(self, rows: slice | Indices) -> Array:
        """Return a copy of these rows."""
        indices = np.arange(len(self))[rows] if isinstance(rows, slice) else rows
        values = np.empty((len(indices), *self.shape[1:]), self.dtype)
        windows = indices // self.window
        for number in np.unique(windows):
            chosen = windows == number
            values[chosen] = self._read(int(number))[indices[chosen] % self.window]
        return values

    def permutation(self, random: np.random.Generator, samples: Indices) -> Indices:
        """Shuffle the sorted `samples` within their windows."""
        starts = np.arange(self.window, len(self), self.window)
        windows = np.split(samples, np.searchsorted(samples, starts))
        return np.concatenate([random.permutation(window) for window in windows])

    def _read(self, number: int) -> Array:
        before = [each for each in self._passes if each.number <= number]
        current = max(before, key=lambda each: each.number, default=None)
        if current is None:
            current = _Pass(self._batches(self.window))
        others = [each for each in self._passes if each is not current]
        self._passes = [*others, current][-_MAX_PASSES:]
        if current.number < number:
            for _ in range(number - current.number - 1):
                next(current.batches)
            current.rows, current.number = self._convert(next(current.batches)), number
            if current.rows.shape[1:] != self.shape[1:] or current.rows.dtype != self.dtype:
                rule = (
                    f"has samples of {current.rows.dtype} {current.rows.shape[1:]}, but its first "
                    f"is {self.dtype} {self.shape[1:]}; all must be the same"
                )
                raise DataError("data.columns.0", f"{self._name} {rule}")
        return current.rows

    def _batches(self, size: int) -> Iterator[Array]:
        return _read_column(self._dataset, self._column, size, "data.columns.0", self._name)

    def _convert(self, values: Array) -> Array:
        return convert_values(NamedArray(values, "data.columns.0", self._name))


@dataclass
class _Pass:
    """One iteration over a Dataset, and its current window."""

    batches: Iterator[Array]
    number: int = -1
    rows: Array = field(default_factory=lambda: np.empty(0))


def load_ray_data(section: RayData) -> DatasetArrays:
    """Execute the Datasets of the user's function; return rows that are read when needed.

    Raises DataError: the function, its pipeline, or a column breaks the contract.
    """
    function, args = section.function, section.args
    datasets = call_data_function(function, args, 0, "data.function", "Ray Datasets")
    rows, labels = {}, {}
    for split, dataset in datasets.items():
        rows[split], labels[split] = _load_split(section, split, dataset)
    num_classes = section.num_classes or int(labels["train"].values.max()) + 1
    for of_split in labels.values():
        check_labels(of_split, num_classes)
    train, test = rows["train"], rows["test"]
    if (train.shape[1:], train.dtype) != (test.shape[1:], test.dtype):
        rule = (
            f"samples of the test set are {test.dtype} {test.shape[1:]}, those of the training "
            f"set {train.dtype} {train.shape[1:]}; both must be the same"
        )
        raise DataError("data.columns.0", rule)
    return DatasetArrays(train, labels["train"].values, test, labels["test"].values, num_classes)


def _load_split(
    section: RayData, split: SourceSplit, dataset: Any
) -> tuple[WindowedRows, NamedArray]:
    (x, y), name = section.columns, f"the {split} set"
    if not hasattr(dataset, "iter_torch_batches"):
        rule = f"{name} must be a ray.data.Dataset, not {type(dataset).__name__}"
        raise DataError("data.function", rule)
    try:
        # Or blocks would come in the order in which their tasks end.
        dataset.context.execution_options.preserve_order = True
        columns = dataset.columns() or []
        for i, column in enumerate((x, y)):
            if column not in columns:
                rule = f"{name} has no column {column!r}; it has {', '.join(columns) or 'no rows'}"
                raise DataError(f"data.columns.{i}", rule)
        dataset = dataset.select_columns([x, y]).materialize()
        only_labels = dataset.select_columns([y])
    except DataError:
        raise
    except Exception as error:  # the user's pipeline can raise anything
        raise DataError("data.function", f"{name} raised {cause(error)}") from error
    values = list(_read_column(only_labels, y, None, "data.columns.1", name))
    values = values or [np.empty(0, np.int64)]  # refused below
    labels = NamedArray(np.concatenate(values), "data.columns.1", f"column {y!r} of {name}")
    check_labels(labels)
    labels = labels._replace(values=labels.values.astype(np.int64))
    return WindowedRows(dataset, x, section.shuffle_rows, f"column {x!r} of {name}"), labels


def _read_column(
    dataset: Any, column: str, size: int | None, field: str, name: str
) -> Iterator[Array]:
    """Yield the column in batches of this size, or one for each block. Raises DataError."""
    try:
        for batch in dataset.iter_torch_batches(batch_size=size, device="cpu"):
            yield batch[column].numpy()
    except Exception as error:  # Ray's, of values that make no tensor or of a lost block
        rule = f"{name} cannot be read as tensors of numbers: {cause(error)}"
        raise DataError(field, rule) from error
