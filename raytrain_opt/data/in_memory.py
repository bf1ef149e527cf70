"""Training data in memory: each batch is gathered, cropped and normalized as one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from raytrain_opt.data import sampling, transforms
from raytrain_opt.data.base import Batch, SourceSplit, TrainingData, no_op
from raytrain_opt.data.in_memory_sets import Array, DatasetArrays
from raytrain_opt.data.sampling import Indices
from raytrain_opt.data.transforms import CopyStream, send
from raytrain_opt.errors import DataError
from raytrain_opt.results import Split

# Larger data sets stay in CPU memory, so that a device has room for model and activations.
_MAX_BYTES_ON_DEVICE = 2 * 1024**3


class InMemoryData(TrainingData):
    """`TrainingData` over arrays in memory, which it never writes to.

    A data set below 2 GiB is copied to a CUDA device once and batches are gathered there;
    otherwise they are gathered in CPU memory.
    """

    source: DatasetArrays

    def _open(self, section: Any) -> None:
        self._padding, self._flip = section.augment.crop_padding, section.augment.flip
        source, device = self.source, self._device
        if not source.is_image and (self._padding or self._flip):
            rule = "crop and flip need uint8 images [samples, height, width, channels]; remove it"
            raise DataError("data.augment", rule)
        total_bytes = source.train_x.nbytes + source.test_x.nbytes
        on_device = device.type == "cuda" and total_bytes < _MAX_BYTES_ON_DEVICE
        self._train_store, self._test_store = (
            SampleStore(x, y, device, on_device=on_device)
            for x, y in ((source.train_x, source.train_y), (source.test_x, source.test_y))
        )

    def _read(self, epoch: int, parts: Iterator[sampling.MicroBatch]) -> Iterator[Batch]:
        for part in parts:
            x, y = self._train_store.take(part.samples, self.on_copy)
            if self._padding or self._flip:
                draws = sampling.draw_crop_flip(
                    self._seed, epoch, part.step, part.rows, self._padding, self._flip
                )
                x = transforms.crop_and_flip(x, draws, self._padding)
            x = self._augment.apply_policy(x, epoch, part.keys)
            yield Batch(self._transform(x), y)

    def eval_batches(
        self, split: Split, rank: int, world_size: int, batch_size: int
    ) -> Iterator[Batch]:
        """See `TrainingData.eval_batches`."""
        store = self._train_store if split == "validation" else self._test_store
        samples = self._rank_samples(split, rank, world_size)
        for start in range(0, len(samples), batch_size):
            x, y = store.take(samples[start : start + batch_size], self.on_copy)
            yield Batch(self._transform(x), y)

    def first_samples(self, split: SourceSplit, count: int = 2) -> Batch:
        """See `TrainingData.first_samples`."""
        is_train = split == "train"
        indices = self._split.training if is_train else self._sets["test"]
        store = self._train_store if is_train else self._test_store
        x, y = store.take(np.resize(indices[:count], count), no_op)
        return Batch(self._transform(x), y)


class SampleStore:
    """Samples in the device's memory, or in CPU memory, which processes of a node may share."""

    def __init__(self, x: Array, y: Array, device: torch.device, *, on_device: bool) -> None:
        self._arrays, self._device, self._copies = (x, y), device, CopyStream(device)
        self._on_device = [torch.tensor(a, device=device) for a in (x, y)] if on_device else []

    def take(
        self, indices: Indices, on_copy: Callable[[], None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x and y of the samples; `on_copy` is called before they go to the device."""
        if self._on_device:
            on_copy()
            rows = send(torch.from_numpy(indices), self._device)
            x, y = (tensor.index_select(0, rows) for tensor in self._on_device)
            return x, y
        gathered = [torch.from_numpy(array[indices]) for array in self._arrays]
        on_copy()
        x, y = self._copies.copy(*gathered)
        return x, y
