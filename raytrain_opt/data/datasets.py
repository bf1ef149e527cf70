"""Training data read sample by sample, by loader processes that live as long as the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from raytrain_opt.config.schema import DatasetData, ImageFolderData
from raytrain_opt.data import order, pixels
from raytrain_opt.data.base import Batch, DataInfo, Split, nothing
from raytrain_opt.data.folders import FolderSource
from raytrain_opt.data.loading import BatchReader, BatchRequest, Loaded, Part, only_request
from raytrain_opt.data.order import Indices, Purpose
from raytrain_opt.data.user_sets import UserSource
from raytrain_opt.errors import DataError

# So many samples of each set are read before a run; more would cost seconds with large images.
_CHECKED = 16


class LoaderData:
    """`TrainingData` over samples that are read one at a time: image files, own Datasets.

    Raises DataError as soon as the folders, the Datasets or the settings are found wrong.
    """

    def __init__(
        self,
        section: ImageFolderData | DatasetData,
        *,
        seed: int,
        device: torch.device,
        channels_last: bool,
    ) -> None:
        source, self._prepare, shape = _open(section, seed, device, channels_last)
        train, self._selection = order.split_selection(
            source.size("train"), section.selection_fraction, section.selection_max_samples, seed
        )
        self._test = np.arange(source.size("test"))
        self.info = DataInfo(
            source.num_classes, shape, len(train), len(self._selection), len(self._test)
        )
        self._orders = order.EpochOrders(train, seed)
        self.on_copy: Callable[[], None] = nothing
        self._device = device
        self._reader = BatchReader(source, seed, section.corrupt == "skip")
        self._loader = _Loader(section, self._reader, device)

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

        def requests() -> Iterator[BatchRequest]:
            for step, share in places:
                of_step = order.step_indices(indices, step, global_batch_size)
                chosen = order.share_places(share, num_shares, global_batch_size)
                name = f"share {share} of {num_shares} of step {step} of epoch {epoch}"
                yield _request(name, "train", Purpose.TRAIN_SAMPLE, epoch, of_step[chosen])

        return self._batches(requests())

    def evaluate(
        self, split: Split, rank: int, world_size: int, batch_size: int
    ) -> Iterator[Batch]:
        """See `TrainingData.evaluate`. Raises DataError when there is no selection split.

        A Dataset of the user's own keeps its transforms on the selection split, with the same
        random numbers each time.
        """
        selection = split == "selection"
        part = order.rank_indices(self._selection if selection else self._test, rank, world_size)
        purpose = Purpose.SELECTION_SAMPLE if selection else Purpose.TEST_SAMPLE

        def requests() -> Iterator[BatchRequest]:
            for start in range(0, len(part), batch_size):
                name = f"batch {start // batch_size} of rank {rank} of the {split} split"
                chosen = part[start : start + batch_size]
                yield _request(name, "train" if selection else "test", purpose, 0, chosen)

        return self._batches(requests())

    def check_samples(self) -> None:
        """Read a few, spread over each set, in this process. Raises DataError."""
        sets: tuple[tuple[Part, Purpose, Indices], ...] = (
            ("train", Purpose.SELECTION_SAMPLE, self._orders.train),
            ("test", Purpose.TEST_SAMPLE, self._test),
        )
        for part, purpose, indices in sets:
            places = np.unique(np.linspace(0, len(indices) - 1, _CHECKED).astype(np.int64))
            loaded = self._reader.__getitems__(
                [_request(f"the {part} set", part, purpose, 0, indices[places])]
            )
            if loaded.error is not None:
                raise DataError(loaded.error)

    def close(self) -> None:
        """End the loader processes; a later phase would start new ones."""
        self._loader.close()

    def _batches(self, requests: Iterator[BatchRequest]) -> Iterator[Batch]:
        for loaded in self._loader.load(requests):
            if loaded.error is not None:
                raise DataError(loaded.error)
            self.on_copy()
            x = loaded.x.to(self._device, non_blocking=True)
            y = loaded.y.to(self._device, non_blocking=True)
            yield Batch(self._prepare(x), y, loaded.skipped)


class _Loader:
    """One DataLoader whose plan of batches is replaced for each phase.

    The processes, and what the Datasets keep in them, live on from phase to phase.
    """

    def __init__(
        self, section: ImageFolderData | DatasetData, reader: BatchReader, device: torch.device
    ) -> None:
        self._section = section
        self._reader = reader
        self._device = device
        self._plan = _Plan()
        self._loader: DataLoader[Any] | None = None
        self._running: Iterator[Any] | None = None
        self._phase = 0

    def load(self, requests: Iterator[BatchRequest]) -> Iterator[Loaded]:
        """The batches of one phase, read ahead by the loader processes.

        Raises RuntimeError: a loader process died, or another phase has begun meanwhile.
        """
        self._phase += 1
        phase = self._phase
        self._plan.requests = requests
        if self._loader is None:
            self._loader = self._start()
        with self._processes_watched():
            self._running = iter(self._loader)
        while True:
            if self._running is None or self._phase != phase:
                raise RuntimeError("a phase of this data was read on after the next one had begun")
            with self._processes_watched():
                # No variable here may hold the iterator: close() ends it by dropping it.
                loaded = next(self._running, None)
            if loaded is None:
                return
            yield cast(Loaded, loaded)

    @contextmanager
    def _processes_watched(self) -> Iterator[None]:
        """Errors of the data come as values, so what is raised here is a process that died."""
        try:
            yield
        except (RuntimeError, OSError, EOFError) as error:
            self.close()
            if not self._section.loader_workers:
                raise
            raise RuntimeError(
                f"a loader process ended unexpectedly: killed, or out of memory or of shared "
                f"memory (data.loader_workers is {self._section.loader_workers}): {error}"
            ) from error

    def close(self) -> None:
        self._phase += 1
        self._running = None
        self._loader = None

    def _start(self) -> DataLoader[Any]:
        workers = self._section.loader_workers
        return DataLoader(
            self._reader,
            batch_sampler=self._plan,
            collate_fn=only_request,
            num_workers=workers,
            prefetch_factor=self._section.prefetch if workers else None,
            persistent_workers=workers > 0,
            pin_memory=self._device.type == "cuda",
            # Its own generator: without one the DataLoader draws from the caller's.
            generator=torch.Generator(),
        )


@dataclass
class _Plan:
    """The batch sampler: each "batch of indices" is one request."""

    requests: Iterable[BatchRequest] = ()

    def __iter__(self) -> Iterator[list[BatchRequest]]:
        return ([request] for request in self.requests)


def _request(
    name: str, part: Part, purpose: Purpose, epoch: int, indices: Indices
) -> BatchRequest:
    return BatchRequest(name, part, purpose, epoch, tuple(indices.tolist()))


def _open(
    section: ImageFolderData | DatasetData, seed: int, device: torch.device, channels_last: bool
) -> tuple[FolderSource | UserSource, pixels.Prepare, tuple[int, ...]]:
    """The source, what makes its batches fit for the model, and the shape the model sees."""
    source: FolderSource | UserSource
    if isinstance(section, ImageFolderData):
        source, size = FolderSource(section), section.image_size
        return source, _images(section, (3, size, size), device, channels_last), (3, size, size)
    source = UserSource(section, seed)
    shape = source.sample_shape
    if source.is_image:
        return source, _images(section, shape, device, channels_last), shape
    moments = pixels.given_moments(section.normalize, shape[0]) if shape else None
    return source, pixels.ValueScaling(moments, shape, device, channels_last), shape


def _images(
    section: ImageFolderData | DatasetData,
    shape: tuple[int, ...],
    device: torch.device,
    channels_last: bool,
) -> pixels.Prepare:
    channels, height, width = shape
    moments = pixels.given_moments(section.normalize, channels)
    if moments is None:
        folder_auto = section.normalize == "auto" and isinstance(section, ImageFolderData)
        moments = pixels.IMAGENET if folder_auto else pixels.PLAIN
    return pixels.ImageScaling(moments, (height, width, channels), device, channels_last)
