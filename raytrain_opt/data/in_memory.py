"""Training data in memory: each batch is gathered, cropped and normalized as one tensor.

There are no loader processes: for small images, starting and feeding them costs more than the
work itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from raytrain_opt.config.data import ArraysData, ArraySetData, Augment, HoldOut
from raytrain_opt.data import sampling, transforms
from raytrain_opt.data.base import Batch, DataInfo, TrainingData, count_classes, no_op
from raytrain_opt.data.in_memory_sets import Array, DatasetArrays
from raytrain_opt.data.sampling import Indices
from raytrain_opt.data.source import SourceSplit
from raytrain_opt.data.transforms import Augmentation, CopyStream, send
from raytrain_opt.errors import DataError
from raytrain_opt.results import Split

# Larger data sets stay in CPU memory, so that a device has room for model and activations.
_MAX_BYTES_ON_DEVICE = 2 * 1024**3
# Samples copied to the device at a time: bounds the temporary copy in CPU memory.
_UPLOAD_CHUNK_SAMPLES = 4096


class InMemoryData(TrainingData):
    """`TrainingData` over arrays in memory, which it never writes to.

    A data set below 2 GiB is copied to a CUDA device once and batches are gathered there;
    otherwise they are gathered in CPU memory. Raises DataError for settings that do not match
    the arrays.
    """

    def __init__(
        self,
        arrays: DatasetArrays,
        section: ArraySetData | ArraysData,
        hold_out: HoldOut,
        seed: int,
        device: torch.device,
        channels_last: bool,
    ) -> None:
        self.source, x = arrays, arrays.train_x
        is_image = x.dtype == np.uint8
        shape = (x.shape[3], *x.shape[1:3]) if is_image else x.shape[1:]
        self._augment = _resolve_augment(section, is_image)
        self._more = Augmentation(self._augment, seed, shape, is_uint8=is_image)
        labels = arrays.train_y if section.is_balanced else None
        sampler = sampling.own_sampler(section.sampler)
        self._split = sampling.TrainingSplit(
            len(x), hold_out, seed, balanced_labels=labels, sampler=sampler
        )
        self._seed = seed
        auto = None
        if is_image and section.normalize == "auto":
            auto = transforms.channel_mean_std(x, self._split.training.samples)
        preprocessing = transforms.resolve_preprocessing(section.normalize, shape, is_image, auto)
        self._transform = transforms.make_transform(preprocessing, shape, device, channels_last)
        self.info = DataInfo(
            arrays.num_classes,
            shape,
            *self._split.sizes,
            test_size=len(arrays.test_x),
            class_names=arrays.class_names,
            class_counts=count_classes(arrays.train_y, arrays.num_classes, section.labels_field),
            preprocessing=preprocessing,
            notes=arrays.notes,
        )
        total_bytes = x.nbytes + arrays.test_x.nbytes
        on_device = device.type == "cuda" and total_bytes < _MAX_BYTES_ON_DEVICE
        store: type[DeviceSampleStore | CpuSampleStore]
        store = DeviceSampleStore if on_device else CpuSampleStore
        self._train_store = store(x, arrays.train_y, device)
        self._test_store = store(arrays.test_x, arrays.test_y, device)

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
        """See `TrainingData.train_batches`."""
        order = self._split.order(epoch, search=search, held_out=held_out)
        padding, flip = self._augment.crop_padding, self._augment.flip
        for step, number in indices:
            samples, rows, relative_size = sampling.micro_batch(
                order, step, number, num_micro_batches, global_batch_size
            )
            x, y = self._train_store.take(samples, self.on_copy)
            if padding or flip:
                draws = sampling.draw_crop_flip(self._seed, epoch, step, rows, padding, flip)
                x = transforms.crop_and_flip(x, draws, padding)
            keys = sampling.sample_keys(step, rows, global_batch_size)
            x = self._more.apply_policy(x, epoch, keys)
            batch = Batch(self._transform(x), y, relative_size=relative_size)
            yield self._more(batch, epoch, step, rows)

    def eval_batches(
        self, split: Split, rank: int, world_size: int, batch_size: int
    ) -> Iterator[Batch]:
        store, indices = self._test_store, np.arange(self.info.test_size)
        if split == "validation":
            store, indices = self._train_store, self._split.validation
        samples = sampling.rank_indices(indices, rank, world_size)
        for start in range(0, len(samples), batch_size):
            x, y = store.take(samples[start : start + batch_size], self.on_copy)
            yield Batch(self._transform(x), y)

    def first_samples(self, split: SourceSplit, count: int = 2) -> Batch:
        """See `TrainingData.first_samples`."""
        is_train = split == "train"
        indices = self._split.training.samples if is_train else np.arange(self.info.test_size)
        store = self._train_store if is_train else self._test_store
        x, y = store.take(np.resize(indices[:count], count), no_op)
        return Batch(self._transform(x), y)


class CpuSampleStore:
    """Samples in CPU memory, which other processes on the node may share."""

    def __init__(self, x: Array, y: Array, device: torch.device) -> None:
        self._x, self._y, self._copies = x, y, CopyStream(device)

    def take(
        self, indices: Indices, on_copy: Callable[[], None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x and y of the samples, gathered in CPU memory and then copied to the device."""
        x, y = torch.from_numpy(self._x[indices]), torch.from_numpy(self._y[indices])
        on_copy()
        x, y = self._copies.copy(x, y)
        return x, y


class DeviceSampleStore:
    """All samples in the device's memory; only their indices are copied for a batch."""

    def __init__(self, x: Array, y: Array, device: torch.device) -> None:
        self._x, self._y, self._device = _upload(x, device), _upload(y, device), device

    def take(
        self, indices: Indices, on_copy: Callable[[], None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x and y of the samples, gathered on the device."""
        on_copy()
        on_device = send(torch.from_numpy(indices), self._device)
        return self._x.index_select(0, on_device), self._y.index_select(0, on_device)


def _upload(array: Array, device: torch.device) -> torch.Tensor:
    """Copy an array to the device in writable chunks: torch warns about read-only memory."""
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    tensor = torch.empty(array.shape, dtype=dtype, device=device)
    for start in range(0, len(array), _UPLOAD_CHUNK_SAMPLES):
        chunk = array[start : start + _UPLOAD_CHUNK_SAMPLES].copy()
        tensor[start : start + _UPLOAD_CHUNK_SAMPLES].copy_(torch.from_numpy(chunk))
    return tensor


def _resolve_augment(section: ArraySetData | ArraysData, is_image: bool) -> Augment:
    if not is_image and (section.augment.crop_padding or section.augment.flip):
        rule = "crop and flip need uint8 images [samples, height, width, channels]; remove it"
        raise DataError("data.augment", rule)
    return section.augment
