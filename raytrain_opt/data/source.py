"""A data set from which samples are read one at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

from torch.utils.data import default_collate

from raytrain_opt.data.base import DataSource, SourceSplit
from raytrain_opt.data.images import center_crop, random_crop
from raytrain_opt.data.sampling import Indices
from raytrain_opt.data.transforms import IMAGENET_MEAN_STD, MeanStd

Sample = Any  # (x, label), or for a user's task any nesting of tensors


class SampleSource(DataSource):
    """Samples that loader processes read one at a time; `has_pairs`: as (x, label)."""

    has_pairs: bool = True

    @abstractmethod
    def read(
        self, split: SourceSplit, index: int, augment: bool, fetched: bytes | None = None
    ) -> Sample:
        """Return x, in the type and layout of the batch, and its class; or a task's sample.

        Raises DataError for a sample that breaks the contract; other exceptions: it is unreadable.
        """

    @abstractmethod
    def describe(self, split: SourceSplit, index: int) -> str:
        """Return the file of the sample, or its index, for an error message."""

    def fetch(self, split: SourceSplit, indices: Sequence[int]) -> Sequence[Future[bytes]]:
        """Begin to fetch what loader processes cannot read themselves: of each sample, or none."""
        return ()

    def collate(self, split: SourceSplit, samples: list[Sample]) -> Any:
        """Return the batch of these samples."""
        return default_collate(samples)


class ImageSource(SampleSource):
    """Images as uint8 [image_size, image_size, 3]; grayscale becomes RGB."""

    is_cropped: ClassVar[bool] = True
    is_image = True
    labels: Indices

    def __init__(self, image_size: int, *, crops_at_random: bool = True) -> None:
        self.sample_shape = (3, image_size, image_size)
        self._size, self._crops_at_random = image_size, crops_at_random

    def mean_std(self, samples: Indices) -> MeanStd:
        return IMAGENET_MEAN_STD

    @abstractmethod
    def content(self, split: SourceSplit, index: int) -> bytes:
        """Return the image file. Raises DataError, OSError, ValueError."""

    @abstractmethod
    def label(self, split: SourceSplit, index: int) -> int:
        """Return the class of the image."""

    def read(
        self, split: SourceSplit, index: int, augment: bool, fetched: bytes | None = None
    ) -> Sample:
        """Return a random crop, perhaps mirrored, if the job wants it; else the center."""
        crop = random_crop if augment and self._crops_at_random else center_crop
        content = self.content(split, index) if fetched is None else fetched
        return crop(content, self._size), self.label(split, index)
