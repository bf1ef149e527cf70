"""Training data read sample by sample, by loader processes that live as long as the run."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.data import LoaderSection
from raytrain_opt.data.base import Batch, SourceSplit, TrainingData
from raytrain_opt.data.batch_reader import BatchReader, BatchRequest, LoadedBatch, keep_batch
from raytrain_opt.data.nesting import leaves, map_leaves
from raytrain_opt.data.sampling import MicroBatch, Purpose
from raytrain_opt.data.source import SampleSource
from raytrain_opt.data.transforms import CopyStream
from raytrain_opt.errors import DataError
from raytrain_opt.results import Split

# Batches that each loader process prepares ahead.
_PREFETCH = 2
# Of `loader_workers: auto`, until batches were measured: with one, every delay is waited for.
_FIRST_PROCESSES = 2
_MEASURED_BATCHES = 8
_FETCHED_AHEAD = 4
# More would cost seconds with large images.
_CHECKED_SAMPLES = 16
# Of samples that are read without augmentation.
_PURPOSES = {
    "train": Purpose.VALIDATION_SAMPLE,
    "test": Purpose.TEST_SAMPLE,
    "final": Purpose.TEST_SAMPLE,
}
# More than the mean needs, as batches differ.
_SPARE = 1.25


class DataLoaderData(TrainingData):
    """`TrainingData` over samples that are read one at a time: image files, a user's Datasets."""

    source: SampleSource

    def _open(self, section: LoaderSection) -> None:
        self._copies, example = CopyStream(self._device), self.source.example
        preprocessing = self.info.preprocessing
        is_normalized = preprocessing is not None and preprocessing.mean_std is not None
        dtype = None if is_normalized or example is None else next(leaves(example)).dtype
        if section.augment.mixup and dtype is not None and not dtype.is_floating_point:
            rule = f"needs samples of floats or images; these are {dtype}"
            raise DataError("data.augment.mixup", rule)
        skip = section.on_unreadable == "skip"
        self._reader = BatchReader(self.source, self._seed, skip, self._augment.policy)
        self._loader = _ReusedLoader(section, self._reader, self._device)

    def _read(self, epoch: int, parts: Iterator[MicroBatch]) -> Iterator[Batch]:
        def requests() -> Iterator[BatchRequest]:
            for part in parts:
                samples, keys = part.samples.tolist(), part.keys.tolist()
                yield BatchRequest("train", Purpose.TRAIN_SAMPLE, epoch, samples, keys)

        return self._batches(requests())

    def eval_batches(
        self, split: Split, rank: int, world_size: int, batch_size: int
    ) -> Iterator[Batch]:
        """See `TrainingData.eval_batches`.

        A user's Dataset transforms the validation split too, with the same random numbers each
        time. A batch of which no sample can be read is passed over, unless all are like that.
        """
        source_split: SourceSplit = "train" if split == "validation" else split
        samples = self._rank_samples(split, rank, world_size)

        def requests() -> Iterator[BatchRequest]:
            for start in range(0, len(samples), batch_size):
                batch = samples[start : start + batch_size].tolist()
                yield BatchRequest(source_split, _PURPOSES[source_split], 0, batch)

        return self._batches(requests(), evaluation=True)

    def first_samples(self, split: SourceSplit, count: int = 2) -> Batch:
        """See `TrainingData.first_samples`; a few others, spread over the set, are read too."""
        every = self._sets["test"] if split == "test" else self._split.training
        spread = np.linspace(0, len(every) - 1, _CHECKED_SAMPLES).astype(np.int64)
        loaded = self._read_here(split, every[np.unique(spread)].tolist())
        if loaded.error is not None:
            raise loaded.error
        readable = [*loaded.indices] * count
        return self._to_device(self._read_here(split, readable[:count]))

    def _read_here(self, split: SourceSplit, samples: list[int]) -> LoadedBatch:
        return self._reader.__getitems__([BatchRequest(split, _PURPOSES[split], 0, samples)])

    def close(self) -> None:
        """End the loader processes; a later phase would start new ones."""
        self._loader.close()

    def _copy(self, content: Any) -> Any:
        """Return a batch's tensors on the device, in their nesting."""
        copies = iter(self._copies.copy(*leaves(content)))
        return map_leaves(
            lambda leaf: next(copies) if isinstance(leaf, torch.Tensor) else leaf, content
        )

    def _to_device(self, loaded: LoadedBatch) -> Batch:
        content, skipped = self._copy(loaded.content), loaded.skipped
        if not self.source.has_pairs:
            return Batch(content, None, skipped, indices=loaded.indices)
        x, y = content
        return Batch(self._transform(x), y, skipped, indices=loaded.indices)

    def _batches(
        self, requests: Iterator[BatchRequest], *, evaluation: bool = False
    ) -> Iterator[Batch]:
        unreadable, is_empty = None, True
        for loaded in self._loader.load(_fetched(self.source, requests)):
            self.skipped += loaded.skipped if evaluation else 0
            if evaluation and loaded.skipped and loaded.error is not None:
                unreadable = loaded.error
                continue
            if loaded.error is not None:
                raise loaded.error
            is_empty = False
            self.on_copy()
            yield self._to_device(loaded)
        if unreadable is not None and is_empty:
            raise unreadable


def _fetched(source: SampleSource, requests: Iterator[BatchRequest]) -> Iterator[BatchRequest]:
    """Yield the requests with what loader processes cannot read, fetched a few batches ahead."""
    pending: deque[tuple[BatchRequest, Sequence[Future[bytes]]]] = deque()

    def pop() -> BatchRequest:
        request, contents = pending.popleft()
        return request._replace(fetched=[content.result() for content in contents])

    for request in requests:
        contents = source.fetch(request.split, request.indices)
        pending.append((request, contents))
        if len(pending) > (_FETCHED_AHEAD if contents else 0):
            yield pop()
    while pending:
        yield pop()


class _ReusedLoader:
    """One DataLoader, whose processes live on, for all phases; each phase has its own requests.

    With `loader_workers: auto`, a phase begins with more processes when in earlier ones a batch
    took longer to load, per process, than to compute; at most one for each compute thread.
    """

    def __init__(self, section: LoaderSection, reader: BatchReader, device: torch.device) -> None:
        self._fixed = None if section.loader_workers == "auto" else section.loader_workers
        self._device, self._reader, self._sampler = device, reader, _RequestSampler()
        self._loader: DataLoader[Any] | None = None
        self._batches: Iterator[Any] | None = None
        self._phase = 0
        self._load_s: list[float] = []
        self._compute_s: list[float] = []
        first = min(_FIRST_PROCESSES, torch.get_num_threads())
        self.processes = first if self._fixed is None else self._fixed

    def load(self, requests: Iterator[BatchRequest]) -> Iterator[LoadedBatch]:
        """Yield the batches of one phase, which the loader processes read ahead."""
        self._phase += 1
        phase = self._phase
        self._sampler.requests = requests
        self._add_processes()
        if self._loader is None:
            self._loader = self._start()
        with self._explain_dead_process(), _sigchld_handler_kept():
            self._batches = iter(self._loader)
        while True:
            if self._batches is None or self._phase != phase:
                raise RuntimeError("batches of an earlier phase were read in a later one")
            with self._explain_dead_process():
                # No variable here may hold the iterator: close() ends it by dropping it.
                batch = next(self._batches, None)
            if batch is None:
                return
            received_s = monotonic_s()
            yield cast(LoadedBatch, batch)
            self._load_s.append(batch.load_s)
            self._compute_s.append(monotonic_s() - received_s)

    def _add_processes(self) -> None:
        """Start more loader processes if those of `loader_workers: auto` are too slow."""
        if self._fixed is not None or len(self._load_s) < _MEASURED_BATCHES:
            return
        # A GPU computes while this process continues, so `compute_s` may be less than it takes:
        # more processes are started than needed, up to the limit. To know better, every step
        # would have to wait for the GPU.
        load_s, compute_s = sum(self._load_s), sum(self._compute_s)
        self._load_s, self._compute_s = [], []
        limit = torch.get_num_threads()
        needed = limit if compute_s == 0 else math.ceil(_SPARE * load_s / compute_s)
        if min(needed, limit) > self.processes:
            self.processes = min(needed, limit)
            self._batches = self._loader = None

    @contextmanager
    def _explain_dead_process(self) -> Iterator[None]:
        """Explain an exception of the DataLoader: a process died, as data errors are values."""
        try:
            yield
        except (RuntimeError, OSError, EOFError) as error:
            self.close()
            if not self.processes:
                raise
            raise DataError(
                "data.loader_workers",
                "a loader process was killed or left, or ran out of memory or of shared memory; "
                f"try fewer (now {self.processes}): {error}",
            ) from error

    def close(self) -> None:
        """End the loader processes, which exit when nothing refers to their iterator."""
        self._phase += 1
        self._batches = None
        self._loader = None

    def _start(self) -> DataLoader[Any]:
        return DataLoader(
            self._reader,
            batch_sampler=self._sampler,
            collate_fn=keep_batch,
            num_workers=self.processes,
            prefetch_factor=_PREFETCH if self.processes else None,
            persistent_workers=self.processes > 0,
            pin_memory=self._device.type == "cuda",
            # Its own generator: without one the DataLoader draws from the caller's.
            generator=torch.Generator(),
            worker_init_fn=_leave_group,
        )


def _leave_group(_: int) -> None:
    """Let what `timeout` and terminals send to a group of processes reach the main one only."""
    os.setpgid(0, 0)


@contextmanager
def _sigchld_handler_kept() -> Iterator[None]:
    """Keep the DataLoader from a signal handler that raises in the main thread, anywhere."""
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handler)


@dataclass
class _RequestSampler:
    """The DataLoader's batch sampler: each "batch of indices" is one request."""

    requests: Iterable[BatchRequest] = ()

    def __iter__(self) -> Iterator[list[BatchRequest]]:
        return ([request] for request in self.requests)
