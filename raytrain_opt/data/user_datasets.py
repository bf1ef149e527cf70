"""The user's own torch Datasets, with every part of their contract checked."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

from raytrain_opt.config.data import DatasetData
from raytrain_opt.config.load import resolve_function
from raytrain_opt.config.section import Instance, function_name
from raytrain_opt.data.base import SourceSplit, channel_axis, column_note, digest, layout_note
from raytrain_opt.data.batch_reader import cause
from raytrain_opt.data.in_memory_sets import DIGEST_BYTES
from raytrain_opt.data.nesting import leaves, map_leaves
from raytrain_opt.data.sampling import Indices, Purpose, sample_seed
from raytrain_opt.data.source import Sample, SampleSource
from raytrain_opt.errors import DataError
from raytrain_opt.random_state import seeded

# Types of x that a network gets as they are; all others become float32.
KEPT = (torch.float32, torch.int8, torch.int16, torch.int32, torch.int64)


class UserDatasetSource(SampleSource):
    """Samples of the Datasets (train, test) that the user's function returns.

    With `classification` they are (x, label): uint8 [C, H, W] or [H, W, C] is an image and
    becomes [H, W, C]; integers stay integers; every other x becomes float32. Else they are any
    nesting of tensors, arrays and numbers, in which float64 becomes float32. `example`: the first
    sample. Raises DataError: the function, a Dataset or a sample breaks the contract.
    """

    field = "data.name"
    labels: Indices | None = None  # while the first sample is read

    def __init__(self, section: DatasetData, seed: int, *, classification: bool = True) -> None:
        self.has_pairs, self._name = classification, function_name(section.name)
        self._datasets = _call(section.name, section.args, seed)
        for split in self._datasets:
            self._check_dataset(split)
        self.num_classes = self._resolve_num_classes(section.num_classes)
        train = _without_subset(self._datasets["train"])
        names = getattr(train, "classes", None)
        if isinstance(names, Collection) and len(names) == self.num_classes:
            self.class_names = tuple(map(str, names))
        collate = section.collate or getattr(self._datasets["train"], "collate_fn", None)
        self._collate = None if collate is None else resolve_function(collate, "data.collate")
        own = None if section.collate else getattr(self._datasets["test"], "collate_fn", None)
        self._collate_test = own or self._collate
        self.example = self._probe()
        first, is_batch = next(leaves(self.example)), self._collate is not None
        self.sample_shape = tuple(first.shape[1:] if is_batch else first.shape)
        self.is_image = classification and first.dtype == torch.uint8 and not is_batch
        # Others may normalize what they return.
        if type(train) is TensorDataset and not is_batch and section.normalize == "auto":
            for i, tensor in enumerate(train.tensors):
                if tensor.is_floating_point() and tensor.ndim <= 2 and not tensor.is_sparse:
                    table = tensor.detach().float().cpu().numpy()
                    self.notes += column_note(f"{self._name}, tensor {i}", table)
        self.labels = self._targets()
        self._expected = _describe(self.example)
        if section.group_by_length is not None:
            self.lengths, self.window = self._lengths(), section.group_by_length

    def _targets(self) -> Indices | None:
        """Return the classes of the training samples, named as by torchvision's Datasets."""
        train = self._datasets["train"]
        try:
            labels = np.asarray(getattr(train, "targets", ()))
        except ValueError:  # of different lengths
            return None
        if labels.shape != (len(train),) or labels.dtype.kind not in "iu":
            return None
        is_class = (labels >= 0) & (labels < self.num_classes)
        return labels.astype(np.int64) if self.has_pairs and is_class.all() else None

    def digest(self) -> str:
        """Return a digest of labels, parts and tensors, where known, and of a sample's form."""
        return digest(self._known_parts())

    def _known_parts(self) -> Iterator[bytes | memoryview]:
        """Yield the parts one after the other: together, tensors may take much memory."""
        yield self._expected.encode()
        if self.labels is not None:
            yield self.labels.tobytes()
        for dataset in self._datasets.values():
            while isinstance(dataset, Subset):
                yield np.asarray(dataset.indices, np.int64).tobytes()
                dataset = dataset.dataset
            if type(dataset) is TensorDataset:
                for tensor in dataset.tensors:
                    size = tensor.numel() * tensor.element_size()
                    rows = torch.arange(0, len(tensor), 1 + size // DIGEST_BYTES)
                    part = tensor.detach().index_select(0, rows.to(tensor.device)).cpu()
                    yield part.to_dense().contiguous().view(torch.uint8).numpy().data

    def size(self, split: SourceSplit) -> int:
        """Return the number of samples."""
        return len(self._datasets[split])

    def read(
        self, split: SourceSplit, index: int, augment: bool, fetched: bytes | None = None
    ) -> Sample:
        """Return one checked sample; `augment` is unused, as the Dataset itself augments."""
        if self._collate is not None:
            return self._datasets[split][index]
        sample = self._sample(split, index)
        if (described := _describe(sample)) != self._expected:
            rule = f"it is {described} but the first training sample is {self._expected}; all "
            rule += "must be the same, e.g. by a resize in the Dataset, or data.collate pads them"
            raise self._error(split, index, rule)
        if not self.has_pairs:
            return sample
        x, label = sample
        return (x.permute(1, 2, 0).contiguous() if self.is_image else x), label

    def collate(self, split: SourceSplit, samples: list[Sample]) -> Any:
        """Return the batch of the samples: stacked, or by the user's function, as tensors."""
        collate = self._collate if split == "train" else self._collate_test
        if collate is None:
            return super().collate(split, samples)
        try:
            batch = map_leaves(_as_tensor, collate(samples))
        except Exception as error:
            kind = type(samples[0]).__name__
            rule = f"raised {cause(error)}; called with a list of {len(samples)} samples ({kind})"
            raise DataError("data.collate", rule) from error
        if not any(True for _ in leaves(batch)):
            rule = f"must return tensors, or a dict, list or tuple with them, not {batch!r:.100}"
            raise DataError("data.collate", rule)
        return self._checked_pair(batch) if self.has_pairs else batch

    def _checked_pair(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x and y of a collated batch. Raises DataError unless y are classes."""
        match batch:
            case (torch.Tensor() as x, torch.Tensor() as y) if y.shape == x.shape[:1]:
                is_class = (y >= 0) & (y < self.num_classes) & (y == y.long())
                if is_class.all():
                    return x, y.long()
        rule = "must return (x, y), x [samples, ...] and class numbers y [samples] below "
        rule += f"{self.num_classes} (data.num_classes), or the job needs a task of its own; it "
        raise DataError("data.collate", f"{rule}returned {_describe(batch)}")

    def _lengths(self) -> Indices:
        """Return `lengths` of the training Dataset. Raises DataError."""
        size = self.size("train")
        lengths = np.asarray(getattr(self._datasets["train"], "lengths", ()))
        if lengths.shape != (size,):
            rule = f"needs `lengths` of the training Dataset, one for each of its {size} samples"
            raise DataError("data.group_by_length", rule)
        return lengths

    def describe(self, split: SourceSplit, index: int) -> str:
        """Return the data set and the index, for an error message."""
        return f"sample {index} of the {split} set of {self._name} cannot be read"

    def _check_dataset(self, split: SourceSplit) -> None:
        dataset, name = self._datasets[split], f"the {split} set of {self._name}"
        if isinstance(dataset, IterableDataset):
            rule = "of which no order can follow from the seed, and no epoch be resumed; wrap "
            rule += "list(dataset) in a Dataset, or write its samples to files"
            raise DataError(self.field, f"{name} is an IterableDataset, {rule}")
        if not (isinstance(dataset, Sized) and hasattr(dataset, "__getitem__") and len(dataset)):
            rule = "it must be a map-style Dataset with __len__ and __getitem__, and not empty"
            raise DataError(self.field, f"{name} is {type(dataset).__name__}; {rule}")

    def _resolve_num_classes(self, num_classes: int | None) -> int:
        train = _without_subset(self._datasets["train"])
        if num_classes is not None:
            return num_classes
        if getattr(train, "num_classes", None) is not None:
            return int(train.num_classes)
        if getattr(train, "classes", None) is not None:
            return len(train.classes)
        if not self.has_pairs:
            return 1
        if isinstance(train, TensorDataset) and not train.tensors[-1].is_floating_point():
            return int(train.tensors[-1].max()) + 1
        rule = "has neither num_classes nor classes; give the job data.num_classes (in Python "
        rule += 'data={"name": (train, test), "num_classes": 10}); without classes, write a task'
        raise DataError("data.num_classes", f"the train set of {self._name} {rule}")

    def _probe(self) -> Sample:
        """Return the first training sample, whose form all others have."""
        try:
            with seeded(0):
                if self._collate is not None:
                    return self.collate("train", [self._datasets["train"][0]])
                return self._sample("train", 0)
        except DataError:
            raise
        except Exception as error:
            raise DataError(self.field, f"{self.describe('train', 0)}: {cause(error)}") from error

    def _sample(self, split: SourceSplit, index: int) -> Sample:
        sample = self._datasets[split][index]
        if not self.has_pairs:
            return self._tensors(split, index, sample)
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            rule = f"it must be a pair (x, label), not {type(sample).__name__}"
            raise self._error(split, index, rule)
        x, label = _as_tensor(sample[0]), sample[1]
        if not isinstance(x, torch.Tensor):
            rule = f"x is {type(x).__module__}.{type(x).__name__}; it must be a tensor or "
            rule += "array (of PIL images make one by torchvision.transforms.v2.PILToTensor())"
            raise self._error(split, index, rule)
        if x.dtype == torch.uint8 and x.ndim == 3:
            axis = channel_axis(tuple(x.shape), default=0)
            self.notes = self.notes or (layout_note(self._name, tuple(x.shape), 0),)
            x = x if axis == 0 else x.permute(2, 0, 1)
        is_kept = x.dtype in KEPT or (x.dtype == torch.uint8 and x.ndim == 3)
        x = x.detach() if is_kept else x.detach().float()
        return x, self._class_index(split, index, label)

    def _tensors(self, split: SourceSplit, index: int, sample: Any) -> Sample:
        """Return the sample of a user's task with all leaves as tensors."""

        def convert(leaf: Any) -> torch.Tensor:
            if isinstance(leaf, np.generic | int | float):
                leaf = torch.as_tensor(leaf)
            leaf = _as_tensor(leaf)
            if not isinstance(leaf, torch.Tensor):
                rule = (
                    f"it contains a {type(leaf).__name__}; with a task of your own it must be a "
                    "tensor, an array or a number, or a dict, list or tuple of these"
                )
                raise self._error(split, index, rule)
            return leaf.detach()

        tensors = map_leaves(convert, sample)
        if not any(True for _ in leaves(tensors)):
            raise self._error(split, index, "it has no tensor")
        return tensors

    def _class_index(self, split: SourceSplit, index: int, label: Any) -> int:
        try:
            number = operator.index(label)
        except TypeError:
            number = -1
        if not 0 <= number < self.num_classes:
            rule = f"its label is {label!r} ({type(label).__name__}); it must be an integer below "
            rule += f"{self.num_classes} (data.num_classes), or the job needs a task"
            raise self._error(split, index, rule)
        if split == "train" and self.labels is not None and number != self.labels[index]:
            rule = f"its label is {number}, but `targets` of the Dataset say {self.labels[index]}"
            hint = "make them equal, or wrap it in a Dataset without `targets`"
            raise self._error(split, index, f"{rule}; {hint}")
        return number

    def _error(self, split: SourceSplit, index: int, rule: str) -> DataError:
        return DataError("data.name", f"sample {index} of the {split} set of {self._name}: {rule}")


def _call(
    name: str | Callable[..., Any], args: dict[str, Any], seed: int
) -> dict[SourceSplit, Any]:
    """Return the two Datasets that the user's function returns. Raises DataError."""
    function = resolve_function(name, "data.name")
    shown = function_name(name)
    try:
        # A function that generates its data must generate the same in every process.
        with seeded(sample_seed(seed, Purpose.USER_FUNCTION, 0, 0)):
            # Datasets themselves are not copied: they may be large.
            pair = function.value if isinstance(function, Instance) else function(**args)
    except Exception as error:
        rule = f"{shown}, called with data.args {args}, raised {cause(error)}"
        raise DataError("data.name", rule) from error
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        rule = f"{shown} must return or be (train, test), two torch Datasets"
        raise DataError("data.name", f"{rule}, not {type(pair).__name__}")
    return {"train": pair[0], "test": pair[1]}


def _without_subset(dataset: Any) -> Any:
    """Return the Dataset of which `random_split` made parts."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def _as_tensor(leaf: Any) -> Any:
    """Return what can be a tensor as one, as the device takes it; other values as they are."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":  # reversed ones are copied
        leaf = torch.from_numpy(np.array(leaf))
    return leaf.float() if torch.is_tensor(leaf) and leaf.dtype == torch.float64 else leaf


def _describe(sample: Sample) -> str:
    described = map_leaves(_kind, sample)
    return described if isinstance(described, str) else str(described).replace("'", "")


def _kind(leaf: Any) -> str:
    is_tensor = isinstance(leaf, torch.Tensor)
    return f"{leaf.dtype} {list(leaf.shape)}" if is_tensor else type(leaf).__name__
