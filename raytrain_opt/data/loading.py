"""Reading one batch of samples, in a loader process or in the process itself.

What goes wrong comes back as a value (`Loaded.error`), because an exception that leaves a
loader process arrives as a wrapped traceback instead of one sentence.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from raytrain_opt.data.order import Purpose, sample_seed
from raytrain_opt.errors import DataError

Part = Literal["train", "test"]
Sample = tuple[torch.Tensor, int]


class SampleSource(Protocol):
    """Where samples come from one at a time."""

    num_classes: int

    def read(self, part: Part, index: int, augment: bool) -> Sample:
        """x as it will lie in the batch, and its class.

        Raises DataError for a sample that breaks the contract; anything else it raises means
        that this sample is unreadable.
        """
        ...

    def describe(self, part: Part, index: int) -> str:
        """The sample as a person knows it: its file, or its place in the data set."""
        ...


class BatchRequest(NamedTuple):
    """Which samples to load, and what their random numbers are derived from."""

    name: str
    part: Part
    purpose: Purpose
    epoch: int
    indices: tuple[int, ...]


class Loaded(NamedTuple):
    """A batch as it comes from a loader; x and y are empty when there is an error."""

    x: torch.Tensor
    y: torch.Tensor
    skipped: int
    error: str | None


class BatchReader(Dataset[Sample]):
    """What the DataLoader calls, with lists of one request."""

    def __init__(self, source: SampleSource, seed: int, skip: bool) -> None:
        self._source = source
        self._seed = seed
        self._skip = skip

    def __getitems__(self, requests: list[BatchRequest]) -> Loaded:
        try:
            with random_state_kept():
                return self._load(requests[0])
        except DataError as error:
            return Loaded(torch.empty(0), torch.empty(0), 0, str(error))

    def _load(self, request: BatchRequest) -> Loaded:
        samples: list[Sample] = []
        reason = ""
        for index in request.indices:
            seed_all(sample_seed(self._seed, request.purpose, request.epoch, index))
            try:
                samples.append(self._read(request, index))
            except _UnreadableError as error:
                reason = str(error)
        if not samples:
            raise DataError(f"nothing readable is left of {request.name}; the last: {reason}")
        x = torch.stack([x for x, _ in samples])
        y = torch.tensor([label for _, label in samples], dtype=torch.int64)
        return Loaded(x, y, len(request.indices) - len(samples), None)

    def _read(self, request: BatchRequest, index: int) -> Sample:
        augment = request.purpose is Purpose.TRAIN_SAMPLE
        try:
            return self._source.read(request.part, index, augment)
        except DataError:
            raise
        except Exception as error:
            # Whatever the decoder or the user's code raised: this one sample is unreadable.
            message = f"{self._source.describe(request.part, index)}: {cause(error)}"
            if self._skip:
                raise _UnreadableError(message) from error
            raise DataError(
                f"{message}; mend or remove it, or leave such samples out: data.corrupt: skip"
            ) from error


class _UnreadableError(Exception):
    """A sample to leave out."""


def cause(error: BaseException) -> str:
    """The error in one line, with the place that raised it (its traceback stays behind)."""
    text = traceback.format_exception_only(error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} (at {frames[-1].filename}:{frames[-1].lineno})" if frames else text


def seed_all(seed: int) -> None:
    """Seed the generators that a sample's code may use: torch's on CPU, numpy's, Python's."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Give the caller its random state back. A loader process has none worth keeping."""
    if get_worker_info() is not None:
        yield
        return
    ours, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(ours)
            np.random.set_state(numpys)


def only_request(loaded: Any) -> Any:
    """The DataLoader's collate step: `BatchReader` has done it."""
    return loaded
