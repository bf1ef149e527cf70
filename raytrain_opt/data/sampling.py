"""Which samples form which batch, and with which random numbers: pure functions of the seed.

    s, p     seed of the job, purpose of the draw (`Purpose`)
    e, t     epoch, and step of the epoch or index of a sample
    B, w     global batch size, and global batches that are sorted by length together
    G(s, p, e, t)   Philox generator with key (s mod 2^64, p), counter starting at (0, 0, t, e)

    validation split   first n samples of a permutation by G(s, VALIDATION_SPLIT, 0, 0)
    order of an epoch  permutation of the training samples by G(s, ORDER, e, 0); of a balanced
                       epoch, which also draws them by it, see `draw_balanced`
    by length          each w B samples of an order sorted by length, then its full batches in an
                       order by G(s, ORDER, e, 1)
    crop, flip         row i of the draws of G(s, CROP, e, t), G(s, FLIP, e, t) belongs to the
                       i-th sample of the global batch of step t
    one sample         reads with a seed from G(s, TRAIN_SAMPLE, e, position in the epoch)

Philox is counter-based: any block of random numbers can be computed without those before it. So
nothing here depends on what was drawn before, or on the processes that compute the micro-batches,
and any part of an epoch can be repeated bit for bit.
Source: Salmon, Moraes, Dror and Shaw, Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raytrain_opt.config.data import HoldOut
from raytrain_opt.config.load import resolve_function
from raytrain_opt.config.section import function_name, is_function_name
from raytrain_opt.errors import DataError
from raytrain_opt.results import EVAL_BLOCK_SIZE

Indices = npt.NDArray[np.int64]
# Takes samples to train on, an epoch and a generator; returns as many of them, in an order.
Sampler = Callable[[Indices, int, np.random.Generator], Indices]

_MAX_UINT64 = 2**64 - 1


class Purpose(IntEnum):
    """The use of random numbers; a changed value changes the results of every seed."""

    VALIDATION_SPLIT = 1
    ORDER = 2
    CROP = 3
    FLIP = 4
    TRAIN_SAMPLE = 5
    VALIDATION_SAMPLE = 6
    TEST_SAMPLE = 7
    DIGITS_SPLIT = 8
    USER_FUNCTION = 9
    MIX = 11


def _philox(seed: int, purpose: Purpose, epoch: int, step: int) -> np.random.Philox:
    # Drawing counts up from the low words, so step and epoch, in the high words, never change.
    key = np.array([seed & _MAX_UINT64, purpose], dtype=np.uint64)
    return np.random.Philox(key=key, counter=np.array([0, 0, step, epoch], dtype=np.uint64))


def generator(seed: int, purpose: Purpose, epoch: int = 0, step: int = 0) -> np.random.Generator:
    """Return the generator G(seed, purpose, epoch, step)."""
    return np.random.Generator(_philox(seed, purpose, epoch, step))


def sample_seed(seed: int, purpose: Purpose, epoch: int, index: int) -> int:
    """Return a seed for reading one sample: 32 bits, all that torch's CPU generator uses."""
    return int(_philox(seed, purpose, epoch, index).random_raw()) >> 32


def split_validation(size: int, hold_out: HoldOut, seed: int) -> tuple[Indices, Indices]:
    """Split `size` samples into sorted indices (to train on, to validate on).

    Raises DataError when no training sample is left.
    """
    if (count := hold_out.count(size)) >= size:
        rule = f"the validation split takes all {size} samples, so no sample is left to train on"
        hint = f"use more samples, or data.validation_fraction: 0 (now {hold_out.fraction})"
        raise DataError("data", f"{rule}; {hint}")
    shuffled = generator(seed, Purpose.VALIDATION_SPLIT).permutation(size)
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])


class TrainingSplit:
    """The training set of a job, cut into samples to train on and the validation split.

    Candidates never train on the validation split. If it is held out in the search only, the
    training uses it too, except in epochs with `held_out`. `balanced_labels`: classes of all
    samples, for epochs with equally many of each. `sampler`: takes the place of all other orders.
    `lengths`: of all samples, to sort each `window` global batches of an order by them. Raises
    DataError like `split_validation`.
    """

    def __init__(
        self,
        size: int,
        hold_out: HoldOut,
        seed: int,
        *,
        balanced_labels: Indices | None = None,
        sampler: Sampler | None = None,
        lengths: Indices | None = None,
        window: int = 1,
    ) -> None:
        self.search, self.validation = split_validation(size, hold_out, seed)
        self.training = np.arange(size) if hold_out.only_in_search else self.search
        self._size, self._seed = size, seed
        self._labels, self._sampler = balanced_labels, sampler
        self._lengths, self._window = lengths, window
        self.order = lru_cache(2)(self._order)  # an epoch is read in many parts

    @property
    def sizes(self) -> tuple[int, int]:
        """Samples of the training and of the validation split."""
        return len(self.training), len(self.validation)

    def _order(
        self, epoch: int, *, search: bool, held_out: int = 0, batch_size: int = 1
    ) -> Indices:
        """Return the order of an epoch, for candidates or for the training; not to be written to.

        held_out: first samples of the validation split, in whose place the training takes others.
        """
        order = self._draw_order(epoch, search)
        if held_out:
            shuffled = generator(self._seed, Purpose.VALIDATION_SPLIT).permutation(self._size)
            is_left_out = np.isin(order, shuffled[:held_out])
            others = order[~is_left_out]
            order = np.where(is_left_out, others[np.arange(len(order)) % len(others)], order)
        if self._lengths is None:
            return order
        random = generator(self._seed, Purpose.ORDER, epoch, 1)
        return group_by_length(order, self._lengths, self._window, batch_size, random)

    def _draw_order(self, epoch: int, search: bool) -> Indices:
        samples = self.search if search else self.training
        random = generator(self._seed, Purpose.ORDER, epoch)
        if self._sampler is not None:
            return self._sampler(samples, epoch, random)
        if self._labels is not None:
            samples = draw_balanced(samples, self._labels, random)
        return random.permutation(samples)


def draw_balanced(samples: Indices, labels: Indices, random: np.random.Generator) -> Indices:
    """Return as many samples as there are, equally many of each class, sorted.

    Samples of small classes come again; of large classes, others come in the next epoch.
    """
    by_class = samples[np.argsort(labels[samples], kind="stable")]
    classes = np.split(by_class, np.flatnonzero(np.diff(labels[by_class])) + 1)
    shares = np.full(len(classes), len(samples) // len(classes))
    shares[random.permutation(len(shares))[: len(samples) - shares.sum()]] += 1
    drawn = []
    for members, share in zip(classes, shares, strict=True):
        times, rest = divmod(share, len(members))
        drawn += [np.tile(members, times), random.permutation(members)[:rest]]
    return np.sort(np.concatenate(drawn))


def group_by_length(
    order: Indices, lengths: Indices, window: int, batch: int, random: np.random.Generator
) -> Indices:
    """Return the order with samples of similar lengths in each full batch.

    Samples that fill no batch stay where they are: which ones they are must not depend on length.
    """
    full = len(order) // batch * batch
    windows = np.arange(full) // (window * batch)
    batches = order[np.lexsort((lengths[order[:full]], windows))].reshape(-1, batch)
    return np.concatenate([random.permutation(batches).reshape(-1), order[full:]])


def own_sampler(name: str | Sampler) -> Sampler | None:
    """Return the function that `data.sampler` names, if any, with a check of what it returns."""
    if not is_function_name(name):
        return None
    function = resolve_function(name, "data.sampler")

    def draw(samples: Indices, epoch: int, random: np.random.Generator) -> Indices:
        order = np.asarray(function(samples.copy(), epoch, random))
        is_right = order.shape == samples.shape and order.dtype.kind in "iu"
        if not is_right or not np.isin(order, samples).all():
            rule = f"must return {len(samples)} of the samples that it gets, in the order to train"
            raise DataError(
                "data.sampler", f"{function_name(name)} {rule}; it returned {order!r:.100}"
            )
        return order.astype(np.int64)

    return draw


class MicroBatch(NamedTuple):
    """A part of a step: its samples, and their positions in the global batch (`rows`).

    `relative_size`: see `base.Batch`. `keys` of random numbers: positions in the epoch, so that
    copies of a sample differ.
    """

    step: int
    samples: Indices
    rows: slice
    relative_size: float
    keys: Indices


def micro_batch(
    order: Indices, step: int, number: int, num_micro_batches: int, global_batch_size: int
) -> MicroBatch:
    """Return one of the micro-batches of a step of an epoch that has this order.

    Raises ValueError: no such step or micro-batch, or unequal ones in a full global batch.
    """
    is_step = 0 <= step * global_batch_size < len(order)
    is_part = 0 <= number < num_micro_batches and global_batch_size % num_micro_batches == 0
    if not (is_step and is_part):
        part = f"micro-batch {number} of {num_micro_batches} of {global_batch_size} samples"
        raise ValueError(f"{part} in step {step} of an epoch of {len(order)} samples")
    samples = order[step * global_batch_size : (step + 1) * global_batch_size]
    start, stop = (i * len(samples) // num_micro_batches for i in (number, number + 1))
    relative_size = (stop - start) * num_micro_batches / len(samples)
    keys = step * global_batch_size + np.arange(start, stop)
    return MicroBatch(step, samples[start:stop], slice(start, stop), relative_size, keys)


def rank_indices(split: Indices, rank: int, world_size: int) -> Indices:
    """Return the rank's part, complete blocks of neighbors: over all ranks, each sample once.

    So the losses of blocks do not depend on the number of ranks. Raises DataError for an empty
    split.
    """
    if len(split) == 0:
        rule = "it is 0, so there is no validation split to score on"
        raise DataError("data.validation_fraction", rule)
    blocks = -(-len(split) // EVAL_BLOCK_SIZE)
    start, stop = (r * blocks // world_size * EVAL_BLOCK_SIZE for r in (rank, rank + 1))
    return split[start:stop]


class CropFlip(NamedTuple):
    """Corners at which padded images [samples] are cropped, and whether they are mirrored."""

    top: Indices
    left: Indices
    flip: npt.NDArray[np.bool_]


def draw_crop_flip(
    seed: int, epoch: int, step: int, rows: slice, crop_padding: int, flip: bool
) -> CropFlip:
    """Draw for these rows of a global batch; the draw of a row does not depend on the others."""
    corners = generator(seed, Purpose.CROP, epoch, step).integers(
        0, 2 * crop_padding + 1, size=(rows.stop, 2)
    )[rows]
    mirrored = generator(seed, Purpose.FLIP, epoch, step).random(rows.stop)[rows] < 0.5
    return CropFlip(corners[:, 0], corners[:, 1], mirrored & flip)
