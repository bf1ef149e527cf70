"""Training data in memory: batches are gathered, cropped and normalised in one go, no workers.

`Arrays` and `load_arrays` are here too, from array_sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Protocol

import numpy as np
import torch

from raytrain_opt.config.schema import ArraysData, ArraySetData, Augment
from raytrain_opt.data import order, pixels
from raytrain_opt.data.array_sets import Array, Arrays, load_arrays
from raytrain_opt.data.base import Batch, DataInfo, Split, nothing
from raytrain_opt.data.order import Indices
from raytrain_opt.errors import DataError

__all__ = ["ArrayData", "Arrays", "load_arrays"]

_RESIDENT_LIMIT_BYTES = 2 * 1024**3
_UPLOAD_ROWS = 4096


class ArrayData:
    """`TrainingData` over arrays in memory, which it never writes to.

    A set below 2 GiB is copied to a CUDA device once and gathered there; otherwise each batch
    is gathered on the host. Raises DataError for settings that do not fit the arrays.
    """

    def __init__(
        self,
        arrays: Arrays,
        section: ArraySetData | ArraysData,
        *,
        seed: int,
        device: torch.device,
        channels_last: bool,
    ) -> None:
        x = arrays.train_x
        images = x.dtype == np.uint8
        shape = (x.shape[3], *x.shape[1:3]) if images else x.shape[1:]
        train, self._selection = order.split_selection(
            len(x), section.selection_fraction, section.selection_max_samples, seed
        )
        self.info = DataInfo(
            arrays.num_classes, shape, len(train), len(self._selection), len(arrays.test_x)
        )
        self.on_copy: Callable[[], None] = nothing
        self._seed = seed
        self._augment = _augment(section, images)
        self._orders = order.EpochOrders(train, seed)
        self._prepare = _preparation(x, train, section.normalize, device, channels_last)
        resident = (
            device.type == "cuda" and x.nbytes + arrays.test_x.nbytes < _RESIDENT_LIMIT_BYTES
        )
        store = DeviceStore if resident else HostStore
        self._train = store(x, arrays.train_y, device)
        self._test = store(arrays.test_x, arrays.test_y, device)

    def train(
        self, epoch: int, steps: range, shares: range, num_shares: int, global_batch_size: int
    ) -> Iterator[Batch]:
        """See `TrainingData.train`. Raises ValueError for a step or share that does not exist."""
        return self.train_places(epoch, product(steps, shares), num_shares, global_batch_size)

    def train_places(
        self,
        epoch: int,
        places: Iterable[tuple[int, int]],
        num_shares: int,
        global_batch_size: int,
    ) -> Iterator[Batch]:
        """See `TrainingData.train_places`. Raises ValueError like `train`."""
        indices = self._orders.of(epoch)
        drawn: int | None = None
        draws: order.CropFlip | None = None
        for step, share in places:
            if step != drawn:
                drawn, draws = step, self._draws(epoch, step, global_batch_size)
            chosen = order.share_places(share, num_shares, global_batch_size)
            of_step = order.step_indices(indices, step, global_batch_size)
            x, y = self._train.take(of_step[chosen], self.on_copy)
            if draws is not None:
                x = pixels.crop_and_flip(x, draws.take(chosen), self._augment.crop_padding)
            yield Batch(self._prepare(x), y)

    def evaluate(
        self, split: Split, rank: int, world_size: int, batch_size: int
    ) -> Iterator[Batch]:
        """See `TrainingData.evaluate`. Raises DataError when there is no selection split."""
        store = self._train if split == "selection" else self._test
        indices = self._selection if split == "selection" else np.arange(self.info.test_size)
        part = order.rank_indices(indices, rank, world_size)
        for start in range(0, len(part), batch_size):
            x, y = store.take(part[start : start + batch_size], self.on_copy)
            yield Batch(self._prepare(x), y)

    def check_samples(self) -> None:
        """Nothing to do: all of them were checked when they were read."""

    def close(self) -> None:
        """Nothing to end: there are no processes and no files."""

    def _draws(self, epoch: int, step: int, samples: int) -> order.CropFlip | None:
        augment = self._augment
        if not (augment.crop_padding or augment.flip):
            return None
        return order.draw_crop_flip(
            self._seed, epoch, step, samples, augment.crop_padding, augment.flip
        )


class Store(Protocol):
    """Where samples lie, and how some of them become a batch on the device."""

    def __init__(self, x: Array, y: Array, device: torch.device) -> None: ...

    def take(
        self, indices: Indices, on_copy: Callable[[], None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x and y of the samples, on the device, as new tensors."""
        ...


class HostStore:
    """Samples stay in the host's memory, perhaps shared with other processes."""

    def __init__(self, x: Array, y: Array, device: torch.device) -> None:
        self._x, self._y, self._device = x, y, device

    def take(
        self, indices: Indices, on_copy: Callable[[], None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = torch.from_numpy(self._x[indices]), torch.from_numpy(self._y[indices])
        if self._device.type == "cuda":
            x, y = x.pin_memory(), y.pin_memory()
        on_copy()
        return x.to(self._device, non_blocking=True), y.to(self._device, non_blocking=True)


class DeviceStore:
    """Samples are on the device as a whole; only indices travel."""

    def __init__(self, x: Array, y: Array, device: torch.device) -> None:
        self._x, self._y, self._device = _uploaded(x, device), _uploaded(y, device), device

    def take(
        self, indices: Indices, on_copy: Callable[[], None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        on_copy()
        chosen = torch.from_numpy(indices).to(self._device, non_blocking=True)
        return self._x.index_select(0, chosen), self._y.index_select(0, chosen)


def _uploaded(array: Array, device: torch.device) -> torch.Tensor:
    """Copied piece by piece: torch refuses to look at read-only memory, so each piece is ours."""
    kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
    tensor = torch.empty(array.shape, dtype=kind, device=device)
    for start in range(0, len(array), _UPLOAD_ROWS):
        piece = array[start : start + _UPLOAD_ROWS].copy()
        tensor[start : start + _UPLOAD_ROWS].copy_(torch.from_numpy(piece))
    return tensor


def _augment(section: ArraySetData | ArraysData, images: bool) -> Augment:
    if section.augment is None:
        cifar = section.name in ("cifar10", "cifar100")
        return Augment(crop_padding=4 if cifar else 0, flip=cifar)
    if not images and (section.augment.crop_padding or section.augment.flip):
        raise DataError(
            "data.augment: crop and flip need uint8 images [samples, height, width, channels]; "
            "these arrays are none, so leave data.augment out"
        )
    return section.augment


def _preparation(
    x: Array,
    train: Indices,
    normalize: pixels.Normalize,
    device: torch.device,
    channels_last: bool,
) -> pixels.Prepare:
    if x.dtype != np.uint8:
        shape = x.shape[1:]
        moments = pixels.given_moments(normalize, shape[0])
        return pixels.ValueScaling(moments, shape, device, channels_last)
    given = pixels.given_moments(normalize, x.shape[3])
    if given is None:
        given = pixels.channel_moments(x, train) if normalize == "auto" else pixels.PLAIN
    height, width, channels = x.shape[1:]
    return pixels.ImageScaling(given, (height, width, channels), device, channels_last)
