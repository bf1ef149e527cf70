"""A data set from which samples are read one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from raytrain_opt.data.images import center_crop, random_crop
from raytrain_opt.data.transforms import IMAGENET_MEAN_STD, MeanStd

if TYPE_CHECKING:
    import torch

    from raytrain_opt.config.data import HoldOut, LoaderSection
    from raytrain_opt.data.base import TrainingData
    from raytrain_opt.data.sampling import Indices

# The sets a source has: the validation split of `base.Split` is cut from "train".
SourceSplit = Literal["train", "test"]
Sample = Any  # (x, label), or for a user's task any nesting of tensors


class SampleSource(ABC):
    """A training and a test set of `num_classes` classes.

    `sample_shape`: of an x for the model. `is_image`: x are uint8 [height, width, channels], and
    `mean_std` their statistics, if known. `is_cropped`: tests take the center of each image.
    `has_pairs`: samples are (x, label), else any nesting of tensors, such as `example`. `labels`:
    classes of the training samples, if known. `lengths`: of the training samples, by which
    `window` global batches are sorted together. `checked_samples` of each set are read before a
    run. `field`: of the job, which errors of a sample name.
    """

    field: ClassVar[str]
    is_cropped: ClassVar[bool] = False
    checked_samples: ClassVar[int] = 16  # more would cost seconds with large images
    num_classes: int
    sample_shape: tuple[int, ...]
    is_image: bool = False
    mean_std: MeanStd | None = None
    has_pairs: bool = True
    class_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    example: Any = None
    lengths: Indices | None = None
    window: int = 1

    @property
    @abstractmethod
    def labels(self) -> Indices | None: ...

    @abstractmethod
    def size(self, split: SourceSplit) -> int:
        """Return the number of samples."""

    @abstractmethod
    def read(self, split: SourceSplit, index: int, augment: bool) -> Sample:
        """Return x, in the type and layout of the batch, and its class; or a task's sample.

        Raises DataError for a sample that breaks the contract; any other exception means that
        this sample is unreadable.
        """

    @abstractmethod
    def describe(self, split: SourceSplit, index: int) -> str:
        """Return the file of the sample, or its index, for an error message."""

    @abstractmethod
    def digest(self) -> str:
        """Return a digest of what can be known without reading all samples."""

    def collate(self, split: SourceSplit, samples: list[Sample]) -> Any:
        """Return the batch of these samples."""
        from torch.utils.data import default_collate  # not at the top: the driver needs no torch

        return default_collate(samples)

    def permutation(self, random: np.random.Generator, samples: Indices) -> Indices:
        """Return the training samples in a random order."""
        return random.permutation(samples)

    def prepare(  # noqa: B027 - most samples are there
        self, split: SourceSplit, order: Indices, start: int, stop: int
    ) -> None:
        """Wait until the samples order[start:stop] can be read."""

    def open(
        self,
        section: LoaderSection,
        hold_out: HoldOut,
        seed: int,
        device: torch.device,
        channels_last: bool,
    ) -> TrainingData:
        """Return the data of a process that trains or evaluates on `device`."""
        from raytrain_opt.data.loader import DataLoaderData

        return DataLoaderData(self, section, hold_out, seed, device, channels_last)


class ImageSource(SampleSource):
    """Images as uint8 [image_size, image_size, 3]; grayscale becomes RGB."""

    is_cropped: ClassVar[bool] = True
    is_image = True
    mean_std: MeanStd | None = IMAGENET_MEAN_STD

    def __init__(self, image_size: int, *, crops_at_random: bool = True) -> None:
        self.sample_shape = (3, image_size, image_size)
        self._crops_at_random = crops_at_random

    @property
    @abstractmethod
    def labels(self) -> Indices: ...

    @abstractmethod
    def content(self, split: SourceSplit, index: int) -> bytes:
        """Return the image file. Raises DataError, OSError, ValueError."""

    @abstractmethod
    def label(self, split: SourceSplit, index: int) -> int:
        """Return the class of the image."""

    def read(self, split: SourceSplit, index: int, augment: bool) -> Sample:
        """Return a random crop, perhaps mirrored, when `augment` and the job agree, or the center.

        Decoding errors pass through.
        """
        crop = random_crop if augment and self._crops_at_random else center_crop
        image = crop(self.content(split, index), self.sample_shape[1])
        return image, self.label(split, index)
