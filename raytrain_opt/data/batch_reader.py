"""Read one batch of samples, in a loader process or in the training process itself.

An error is returned as a value (`LoadedBatch.error`): an exception that leaves a loader process
arrives as a wrapped traceback instead of one sentence.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, get_worker_info

from raytrain_opt.clock import monotonic_s
from raytrain_opt.data.base import SourceSplit
from raytrain_opt.data.images import ImageError
from raytrain_opt.data.sampling import Purpose, sample_seed
from raytrain_opt.data.source import Sample, SampleSource
from raytrain_opt.errors import DataError, UserCodeError, origin
from raytrain_opt.random_state import find_generators, preserve_random_state, seed_all
from raytrain_opt.user_code import LOADER_SIGNAL, Stalled, exits_as_errors

# Of one image, uint8 [C, H, W].
Policy = Callable[[torch.Tensor], torch.Tensor]


class BatchRequest(NamedTuple):
    """The samples of a batch to load.

    `keys` of their random numbers: else the indices. `fetched`: contents of files that only the
    training process can read.
    """

    split: SourceSplit
    purpose: Purpose
    epoch: int
    indices: Sequence[int]
    keys: Sequence[int] = ()
    fetched: Sequence[bytes] = ()


class LoadedBatch(NamedTuple):
    """A batch from a loader process; with `skipped` samples, an error is that none is readable."""

    content: Any
    skipped: int
    error: DataError | UserCodeError | None
    load_s: float = 0.0
    indices: Sequence[int] = ()


class BatchReader(Dataset[Sample]):
    """The Dataset given to torch's DataLoader; its "indices" are one `BatchRequest`."""

    def __init__(
        self, source: SampleSource, seed: int, skip: bool, policy: Policy | None = None
    ) -> None:
        self._source, self._seed, self._skip, self._policy = source, seed, skip, policy
        # Generators of the user's Datasets, and the split and epoch where they were looked for.
        self._generators = find_generators(source)
        self._searched: tuple[SourceSplit, int] | None = None

    def __getitems__(self, requests: list[BatchRequest]) -> LoadedBatch:
        """Load the batch of the only request in the list."""
        started_s = monotonic_s()
        try:
            with exits_as_errors(), _isolated(started_s):
                loaded = self._load(requests[0])
            return loaded._replace(load_s=monotonic_s() - started_s)
        except (DataError, UserCodeError) as error:
            return LoadedBatch((), 0, error)

    def _load(self, request: BatchRequest) -> LoadedBatch:
        samples, indices, reason = list[Sample](), list[int](), ""
        augment = request.purpose is Purpose.TRAIN_SAMPLE
        keys = request.keys or request.indices
        contents = request.fetched or repeat(None, len(keys))
        for index, key, content in zip(request.indices, keys, contents, strict=True):
            try:
                sample = self._read(request, index, key, content)
                if augment and self._policy is not None:
                    x, label = sample
                    sample = self._policy(x.permute(2, 0, 1)).permute(1, 2, 0), label
                samples.append(sample)
                indices.append(index)
            except DataError:
                raise
            except Exception as error:
                # Whatever the decoder or the user's code raised: this one sample is unreadable.
                reason = f"{self._source.describe(request.split, index)}: {cause(error)}"
                if not self._skip:
                    rule = "repair or remove it, or skip such samples: data.on_unreadable: skip"
                    raise DataError(self._source.field, f"{reason}; {rule}") from error
        if not samples:
            rule = f"no sample of a batch can be read; the last: {reason}"
            return LoadedBatch((), len(request.indices), DataError(self._source.field, rule))
        skipped = len(request.indices) - len(samples)
        content = self._source.collate(request.split, samples)
        return LoadedBatch(content, skipped, None, indices=indices)

    def _read(self, request: BatchRequest, index: int, key: int, content: bytes | None) -> Sample:
        """Read a sample with its random numbers; again, if that has created a generator."""
        seed = sample_seed(self._seed, request.purpose, request.epoch, key)
        seed_all(seed, generators=self._generators)
        augment = request.purpose is Purpose.TRAIN_SAMPLE
        sample = self._source.read(request.split, index, augment, content)
        if self._searched != (request.split, request.epoch):
            before, self._generators = self._generators, find_generators(self._source)
            self._searched = request.split, request.epoch
            if list(map(id, before)) != list(map(id, self._generators)):
                return self._read(request, index, key, content)
        return sample


def cause(error: BaseException) -> str:
    """Return the error in one line, with the user's line that raised it; of images, why."""
    if isinstance(error, ImageError):
        return str(error)
    text = traceback.format_exception_only(error)[-1].strip()
    return f"{text} (at {place})" if (place := origin(error)) else text


@contextmanager
def _isolated(started_s: float) -> Iterator[None]:
    """Preserve the random state, or let the training process ask a loader where it hangs."""

    def handle(_: int, frame: FrameType | None) -> None:
        raise Stalled(frame, started_s)

    if get_worker_info() is None:
        with preserve_random_state():
            yield
        return
    signal.signal(LOADER_SIGNAL, handle)
    try:
        yield
    finally:
        signal.signal(LOADER_SIGNAL, signal.SIG_IGN)


def keep_batch(batch: Any) -> Any:
    """Return the batch unchanged: the DataLoader's `collate_fn`, as `BatchReader` collates."""
    return batch
