"""The user's own torch Datasets, with every part of the contract checked."""

from __future__ import annotations

import operator
from collections.abc import Sized
from typing import Any

import numpy as np
import torch

from raytrain_opt.config.functions import resolve_function
from raytrain_opt.config.schema import DatasetData
from raytrain_opt.config.section import function_name
from raytrain_opt.data.loading import Part, Sample, cause, random_state_kept, seed_all
from raytrain_opt.data.order import Purpose, sample_seed
from raytrain_opt.errors import DataError

# So many samples may be unreadable before the first readable one shows the shape.
_PROBES = 100


class UserSource:
    """Samples (x, label) of the Datasets (train, test) that the user's function returns.

    uint8 [C, H, W] is an image and is handed on as [H, W, C]; integers stay; every other x
    becomes float32. Raises DataError: the function, a Dataset or a sample breaks the contract.
    """

    def __init__(self, section: DatasetData, seed: int) -> None:
        name = section.name
        self._name = name if isinstance(name, str) else function_name(name)
        self._sets = self._call(section, seed)
        for part in self._sets:
            self._check_set(part)
        self.num_classes = self._num_classes(section.num_classes)
        self.sample_shape, self.is_image, self._kind = self._probe(section.corrupt == "skip")

    def size(self, part: Part) -> int:
        """Number of samples."""
        return len(self._sets[part])

    def read(self, part: Part, index: int, augment: bool) -> Sample:
        """One checked sample; augmentation is the Dataset's own business."""
        x, label = self._sample(part, index)
        found = tuple(x.shape), x.dtype
        if found != self._kind:
            raise self._wrong(
                part,
                index,
                f"x is {_shown(found)} but the first training sample's is "
                f"{_shown(self._kind)}; all must be alike, e.g. by a resize in the Dataset",
            )
        if not 0 <= label < self.num_classes:
            raise self._wrong(
                part,
                index,
                f"its label is {label}, outside 0 to {self.num_classes - 1}; "
                "mend the label or data.num_classes",
            )
        return (x.permute(1, 2, 0).contiguous() if self.is_image else x), label

    def describe(self, part: Part, index: int) -> str:
        """Data set and index."""
        return f"data.name: sample {index} of the {part} set of {self._name} cannot be read"

    def _call(self, section: DatasetData, seed: int) -> dict[Part, Any]:
        function = resolve_function(section.name, "data.name")
        try:
            with random_state_kept():
                # A function that makes its data up must make up the same in every process.
                seed_all(sample_seed(seed, Purpose.USER_FUNCTION, 0, 0))
                pair = function(**section.args)
        except Exception as error:
            raise DataError(
                f"data.name: {self._name}, called with data.args {section.args}, raised "
                f"{cause(error)}"
            ) from error
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise DataError(
                f"data.name: {self._name} must return (train, test), two torch Datasets; it "
                f"returned {type(pair).__name__}"
            )
        return {"train": pair[0], "test": pair[1]}

    def _check_set(self, part: Part) -> None:
        dataset = self._sets[part]
        if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
            raise DataError(
                f"data.name: the {part} set of {self._name} is {type(dataset).__name__}; it must "
                "be a map-style Dataset with __len__ and __getitem__"
            )
        if len(dataset) == 0:
            raise DataError(f"data.name: the {part} set of {self._name} is empty")

    def _num_classes(self, given: int | None) -> int:
        train = self._sets["train"]
        if given is not None:
            return given
        if getattr(train, "num_classes", None) is not None:
            return int(train.num_classes)
        if getattr(train, "classes", None) is not None:
            return len(train.classes)
        raise DataError(
            f"data.num_classes: the train set of {self._name} has neither num_classes nor "
            "classes, so write the number in the job"
        )

    def _probe(self, skip: bool) -> tuple[tuple[int, ...], bool, tuple[tuple[int, ...], Any]]:
        """Shape, whether an image, and the kind of the first readable training sample."""
        index = 0
        while True:
            try:
                with random_state_kept():
                    x, _ = self._sample("train", index)
            except DataError:
                raise
            except Exception as error:
                if not skip or index + 1 == min(_PROBES, self.size("train")):
                    raise DataError(f"{self.describe('train', index)}: {cause(error)}") from error
                index += 1
            else:
                shape = tuple(x.shape)
                return shape, x.dtype == torch.uint8, (shape, x.dtype)

    def _sample(self, part: Part, index: int) -> Sample:
        sample = self._sets[part][index]
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise self._wrong(
                part, index, f"it must be a pair (x, label), not {type(sample).__name__}"
            )
        x, label = sample
        if isinstance(x, np.ndarray):
            x = torch.from_numpy(np.array(x))
        if not isinstance(x, torch.Tensor):
            raise self._wrong(
                part,
                index,
                f"x is {type(x).__module__}.{type(x).__name__}; it must be a tensor "
                "or numpy array (for PIL images, add a transform such as "
                "torchvision.transforms.v2.PILToTensor())",
            )
        return _model_type(x.detach()), self._label(part, index, label)

    def _label(self, part: Part, index: int, label: Any) -> int:
        try:
            return operator.index(label)
        except TypeError:
            raise self._wrong(
                part,
                index,
                f"its label is {label!r} ({type(label).__name__}); it must be a "
                "whole class number",
            ) from None

    def _wrong(self, part: Part, index: int, what: str) -> DataError:
        return DataError(f"data.name: sample {index} of the {part} set of {self._name}: {what}")


def _model_type(x: torch.Tensor) -> torch.Tensor:
    """uint8 images and other integers as they are, everything else as float32."""
    image = x.dtype == torch.uint8 and x.ndim == 3
    if image or x.dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        return x
    return x.to(torch.float32)


def _shown(kind: tuple[tuple[int, ...], Any]) -> str:
    return f"{kind[1]} {list(kind[0])}"
