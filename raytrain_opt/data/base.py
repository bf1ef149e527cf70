"""The interface between any training data and the code that trains on it.

A global batch of a step is cut into `num_micro_batches` micro-batches of equal size, numbered
from 0. Workers compute different micro-batches of the same step. The last step of an epoch may
have fewer samples; the sizes of its micro-batches differ by one at most.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from raytrain_opt.config.data import HoldOut
from raytrain_opt.data import sampling
from raytrain_opt.data.nesting import leaves
from raytrain_opt.data.sampling import Indices
from raytrain_opt.errors import DataError, first_of, printable
from raytrain_opt.results import Split

if TYPE_CHECKING:
    import torch

    from raytrain_opt.data.transforms import MeanStd, Preprocessing

# The sets of a source: the validation split of `results.Split` is cut from "train".
SourceSplit = Literal["train", "test", "final"]
# Of gray and color images, and of color with alpha.
CHANNELS = (1, 3, 4)
_NAMES = 10  # classes that are printed
# Of the columns' sizes. At this one a regression lost 5 points of R² (benchmarks/RESULTS.md).
_LARGEST_RATIO = 100
# A regression loses 1 to 3 points of R² where means are this many deviations from 0. Deviations of
# constants are rounding errors, this part of their size.
_FARTHEST, _CONSTANT = 2, 1e-6
_LOOKED_AT = 2_000_000  # values of a table, of which a note is made


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples on the device, ready for the task.

    x [samples, ...]: float32; uint8 images as [N, C, H, W], normalized. y [samples]: int64 class
    indices. For a user's task, x is the nesting of tensors that its samples have, and y is None.
    `skipped`: unreadable samples left out. Of mixed samples, `weight` belongs to y and the rest to
    `other_y`. `relative_size`: number of samples over the mean of the step's micro-batches.
    `indices`: numbers of the samples, where they were read one at a time.
    """

    x: Any
    y: Any
    skipped: int = 0
    other_y: torch.Tensor | None = None
    weight: float = 1.0
    relative_size: float = 1.0
    indices: Sequence[int] | None = None

    @property
    def content(self) -> Any:
        """What a task gets: x and y, of mixed samples other_y and weight too; or the nesting."""
        if self.y is None:
            return self.x
        pair = (self.x, self.y)
        return pair if self.other_y is None else (*pair, self.other_y, self.weight)

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(next(leaves(self.x)) if self.indices is None else self.indices)


@dataclass(frozen=True)
class DataInfo:
    """Sizes of the splits in samples, and the shape of one sample as the model sees it.

    `train_size` samples are trained on; `final_size` are looked at once, after the training.
    `class_counts`: training samples of each class, if they are known. `digest`: set by the driver.
    `notes`: what was left out, and how shapes were read.
    """

    num_classes: int
    sample_shape: tuple[int, ...]
    train_size: int
    validation_size: int
    test_size: int
    final_size: int = 0
    class_names: tuple[str, ...] = ()
    class_counts: tuple[int, ...] = ()
    preprocessing: Preprocessing | None = None
    digest: str = field(default="", compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def last_set(self) -> Literal["test", "final"]:
        """The set that no choice has seen: the third, if there are three."""
        return "final" if self.final_size else "test"

    @property
    def class_labels(self) -> tuple[str, ...]:
        """The names of the classes, or their numbers."""
        return self.class_names or tuple(map(str, range(self.num_classes)))

    @property
    def summary(self) -> dict[str, str]:
        """Lines for people: sizes, and the first classes."""
        sizes = f"{self.train_size:,} to train on, {self.test_size:,} to test"
        names = [printable(name, kept="") for name in self.class_labels]
        more = ", …" if len(names) > _NAMES else ""
        return {"data": sizes, "classes": f"{len(names)}: {', '.join(names[:_NAMES])}{more}"}

    def steps_per_epoch(self, global_batch_size: int) -> int:
        """Return the number of full global batches."""
        return self.train_size // global_batch_size


def no_op() -> None:
    """Do nothing: the `on_copy` of data that nobody measures."""


class DataSource(ABC):
    """A training and a test set of `num_classes` classes, and perhaps a final one.

    `sample_shape`: of an x for the model. `is_image`: x are uint8 [height, width, channels].
    `is_cropped`: tests take the center of each image. `labels`: classes of the training samples,
    if they are known. `lengths`: of the training samples, by which `window` global batches are
    sorted together. `field`: of the job, for errors of labels and samples.
    """

    field: str
    num_classes: int
    sample_shape: tuple[int, ...]
    labels: Indices | None
    final_size: int = 0
    is_image: bool = False
    is_cropped: ClassVar[bool] = False
    class_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    example: Any = None
    lengths: Indices | None = None
    window: int = 1

    @abstractmethod
    def size(self, split: SourceSplit) -> int:
        """Return the number of samples."""

    def file(self, split: SourceSplit, index: int) -> str | None:
        """Return the file of a sample, for people; None if it has none of its own."""
        return None

    @abstractmethod
    def digest(self) -> str:
        """Return a digest of what can be known without reading all samples."""

    def mean_std(self, samples: Indices) -> MeanStd | None:
        """Return mean and deviation of the channels of training images, if they are known."""
        return None


class TrainingData(ABC):
    """Training, validation and test split of a data set.

    Only the iterator that was created last may be used. Each call can be repeated and then
    yields the same batches. Raises DataError for settings that do not match the samples.
    """

    # Called for each batch between reading it and moving it to the device; probes time both.
    on_copy: Callable[[], None] = staticmethod(no_op)
    skipped = 0  # unreadable samples that evaluations have left out

    def __init__(
        self,
        source: DataSource,
        section: Any,
        hold_out: HoldOut,
        seed: int,
        device: torch.device,
        channels_last: bool,
    ) -> None:
        from raytrain_opt.data import transforms  # not at the top: the driver needs no torch

        self.source, self._seed, self._device = source, seed, device
        self._split = _split(source, section, hold_out, seed)
        self._only_full = section.drop_last or hold_out.only_in_search  # updates of candidates
        self._sets = {
            "test": np.arange(source.size("test")),
            "final": np.arange(source.final_size),
            "validation": self._split.validation,
        }
        shape = source.sample_shape
        self._augment = transforms.Augmentation(
            section.augment, seed, shape, is_uint8=source.is_image
        )
        auto = source.mean_std(self._split.training) if section.normalize == "auto" else None
        preprocessing = transforms.resolve_preprocessing(
            section.normalize, shape, source.is_image, auto, center_crop=source.is_cropped
        )
        self._transform = transforms.make_transform(preprocessing, shape, device, channels_last)
        self.info = DataInfo(
            source.num_classes,
            shape,
            *self._split.sizes,
            test_size=source.size("test"),
            final_size=source.final_size,
            class_names=source.class_names,
            class_counts=count_classes(source.labels, source.num_classes, source.field),
            preprocessing=preprocessing,
            notes=source.notes,
        )
        self._open(section)

    @abstractmethod
    def _open(self, section: Any) -> None:
        """Prepare to read samples as the data section says. Raises DataError."""

    def train_batches(
        self,
        epoch: int,
        indices: Iterable[tuple[int, int]],
        num_micro_batches: int,
        global_batch_size: int,
        *,
        search: bool = False,
        held_out: int = 0,
    ) -> Iterator[Batch]:
        """Yield the micro-batch of each (step, micro-batch) in `indices`, in that order.

        Loader processes take from `indices` ahead. `search`, whose steps go on in the next epoch's
        order, and `held_out`: see `TrainingSplit`. Samples and augmentation depend only on (seed,
        epoch, step, index in the global batch). Raises DataError for unreadable samples,
        ValueError for a step or micro-batch that does not exist.
        """
        size = global_batch_size
        order = partial(self._split.order, search=search, held_out=held_out, batch_size=size)
        full, rest = divmod(len(self._split.search), size)
        per_epoch = max(1, full + (rest > 0 and not self._only_full)) if search else sys.maxsize
        taken: deque[sampling.MicroBatch] = deque()

        def parts() -> Iterator[sampling.MicroBatch]:
            for step, number in indices:
                later, own = divmod(step, per_epoch)
                samples = order(epoch + later)
                part = sampling.micro_batch(samples, own, number, num_micro_batches, size)
                taken.append(part._replace(step=step, keys=part.keys + (step - own) * size))
                yield taken[-1]

        for batch in self._read(epoch, parts()):
            part = taken.popleft()
            batch = replace(batch, relative_size=part.relative_size)
            yield self._augment(batch, epoch, part.step)

    @abstractmethod
    def _read(self, epoch: int, parts: Iterator[sampling.MicroBatch]) -> Iterator[Batch]:
        """Yield the batch of each micro-batch, before what changes complete batches."""

    @abstractmethod
    def eval_batches(
        self, split: Split, rank: int, world_size: int, batch_size: int
    ) -> Iterator[Batch]:
        """Yield the rank's part of the split, not augmented: over all ranks, each sample once.

        Raises DataError for an empty validation split.
        """

    def _rank_samples(self, split: Split, rank: int, world_size: int) -> Indices:
        return sampling.rank_indices(self._sets[split], rank, world_size)

    @abstractmethod
    def first_samples(self, split: SourceSplit, count: int = 2) -> Batch:
        """Return a few samples, or one several times, read here and without augmentation.

        Raises DataError for unreadable ones, so that a run fails early.
        """

    def close(self) -> None:  # noqa: B027 - data in memory have no processes
        """End the loader processes, where there are any."""


def _split(
    source: DataSource, section: Any, hold_out: HoldOut, seed: int
) -> sampling.TrainingSplit:
    if section.is_balanced and source.labels is None:
        rule = "balanced needs the class of each sample: `targets` of the training Dataset"
        raise DataError("data.sampler", rule)
    return sampling.TrainingSplit(
        source.size("train"),
        hold_out,
        seed,
        balanced_labels=source.labels if section.is_balanced else None,
        sampler=sampling.own_sampler(section.sampler),
        lengths=source.lengths,
        window=source.window,
    )


def channel_axis(shape: tuple[int, ...], default: int) -> int:
    """Return which axis of an image has the channels: the first, 0, or the last one, -1.

    The only one with 1, 3 or 4 values, or beside a square image, or, if neither has 1, 3 or 4, the
    shorter one; else the `default`.
    """
    first, middle, last = shape
    usual = first in CHANNELS, last in CHANNELS
    for is_first, is_last in (usual, (middle == last, first == middle)):
        if is_first != is_last:
            return 0 if is_first else -1
    if usual[0] or first == last:
        return default
    return 0 if first < last else -1


def refuse_channels_last(shape: tuple[int, ...]) -> None:
    """Raise DataError if samples for a named network look like images with channels last."""
    if len(shape) == 3 and shape[-1] in CHANNELS and shape[0] not in CHANNELS:
        rule = "look like channels last; networks take them first; move the axis, e.g. by "
        rule += "x.transpose(0, 3, 1, 2), or use uint8 images"
        raise DataError("data", f"has samples {list(shape)}, which {rule}")


def layout_note(name: str, shape: tuple[int, ...], default: int) -> str:
    """Return the line that says how the shape of an image was read."""
    axis = channel_axis(shape, default)
    height, width = shape[1:] if axis == 0 else shape[:2]
    image = f"{width} x {height} pixels with {shape[axis]} channels"
    order = "first" if axis == 0 else "last"
    return f"{name}: {list(shape)} is read as {image} (channels {order})"


def column_note(name: str, table: npt.NDArray[Any]) -> tuple[str, ...]:
    """Return a line if columns of floats are far from 0 or of unequal size: both cost accuracy.

    0/1 columns may be far, as they are flags or classes; constants, too.
    """
    if table.ndim > 2 or not np.issubdtype(table.dtype, np.floating) or not table.size:
        return ()
    rows = table[:: 1 + table.size // _LOOKED_AT]
    columns, findings = rows.reshape(len(rows), -1).astype(np.float64), []
    with np.errstate(invalid="ignore"):  # of values that are not finite, which decide nothing
        sizes, means = np.abs(columns).max(axis=0), columns.mean(axis=0)
        low, high = sizes[sizes > 0].min(initial=np.inf), sizes.max()
        is_flag = (columns**2).mean(axis=0) == means
        deviations = columns.std(axis=0)
        is_far = (np.abs(means) > _FARTHEST * deviations) & (deviations > _CONSTANT * sizes)
    if high > _LARGEST_RATIO * low:
        findings = [f"the largest absolute values of columns are {low:.3g} to {high:.3g}"]
    if far := (is_far & ~is_flag).sum():
        number = f"the means of {far} of {len(means)} columns"
        findings.append(f"{number} are more than {_FARTHEST} deviations from 0")
    if not findings:
        return ()
    rule = "networks learn less from such inputs and targets; subtract the mean of each column "
    rule += "and divide it by its deviation, in the data or, for an input with classes, by "
    rule += "data.normalize: [[means], [deviations]]"
    return (f"{name}: {' and '.join(findings)}; {rule}",)


def count_classes(
    labels: npt.NDArray[np.int64] | None, num_classes: int, field: str
) -> tuple[int, ...]:
    """Return the number of training samples of each class; () if their labels are unknown.

    Raises DataError that names `field` for a class without samples.
    """
    if labels is None:
        return ()
    limit = min(num_classes, len(labels) + 5)  # a label of 10^13 would take all memory
    counts = np.bincount(labels[labels < limit], minlength=limit)
    if len(missing := np.flatnonzero(counts == 0)):
        classes = first_of([str(number) for number in missing])
        rule = f"the training set has no sample of class {classes} of its {num_classes} classes"
        raise DataError(field, f"{rule}; classes are numbered from 0, without gaps")
    return tuple(counts.tolist())


# Samples whose contents are compared: a second where a file system takes a millisecond for each.
_SAMPLED = 1000
_EXCERPT = 1024  # bytes


@dataclass(frozen=True)
class DataFingerprint:
    """Classes, sizes, and a digest of what else the source of the samples tells cheaply."""

    classes: tuple[str, ...]
    counts: dict[str, int]
    digest: str

    @classmethod
    def of(cls, info: DataInfo) -> DataFingerprint:
        """Return the fingerprint of data that were read."""
        classes = (f"class {name}" for name in info.class_labels)
        counts = dict(zip(classes, info.class_counts, strict=False))
        counts |= {"the training set": info.train_size, "the test set": info.test_size}
        return cls(info.class_labels, counts, info.digest)

    def changes(self, info: DataInfo) -> str:
        """Return what changed in the data since these were read; "" if they are the same."""
        if (now := DataFingerprint.of(info)) == self:
            return ""
        changes = [f"class {name} is gone" for name in self.classes if name not in now.classes]
        changes += [f"class {name} is new" for name in now.classes if name not in self.classes]
        if self.classes == now.classes:
            changes = [
                f"{name} has {now.counts.get(name, 0)} samples, and had {count}"
                for name, count in self.counts.items()
                if count != now.counts.get(name, 0)
            ]
        what = first_of(changes) or "samples, their labels, their names or their order"
        return f"changed since the checkpoint: {what}"

    def require_same(self, info: DataInfo) -> None:
        """Raise DataError that says what changed in the data since the checkpoint."""
        if changes := self.changes(info):
            hint = "put the data back as they were, or start a new run from the weights"
            raise DataError("data", f"{changes}; {hint} (model.weights: RUN_DIR)")


def spread(count: int, of: int = _SAMPLED) -> range:
    """Return at most about `of` of the numbers below `count`, evenly spread."""
    return range(0, count, 1 + count // of)


def excerpt(path: str | Path, start: int = 0, size: int | None = None) -> bytes:
    """Return the middle and the end of a file or of a part of it; nothing if it cannot be read.

    They differ between compressed images, whose beginnings do not.
    """
    with suppress(OSError), open(path, "rb") as file:
        length = os.fstat(file.fileno()).st_size if size is None else size
        parts = (start + length // 2, start + max(0, length - _EXCERPT))
        return b"".join(os.pread(file.fileno(), _EXCERPT, part) for part in parts)
    return b""


def digest(parts: Iterable[bytes | memoryview]) -> str:
    """Return a digest of these parts."""
    result = blake2b(digest_size=16)
    for part in parts:
        result.update(part)
    return result.hexdigest()
