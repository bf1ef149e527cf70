"""Which samples, in which order, with which random changes: functions of the seed alone.

Every random number comes from a counter-based generator (Philox) whose key is
(seed, purpose) and whose counter starts at (epoch, step). So nothing depends on what was
drawn before, and any phase can be run again, by any process, with the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from raytrain_opt.errors import DataError

Indices = npt.NDArray[np.int64]

_WORD = 2**64 - 1


class Purpose(IntEnum):
    """What random numbers are for: one stream each. The values are part of a run's identity."""

    SELECTION = 1
    ORDER = 2
    CROP = 3
    FLIP = 4
    TRAIN_SAMPLE = 5
    SELECTION_SAMPLE = 6
    TEST_SAMPLE = 7
    DIGITS_SPLIT = 8
    USER_FUNCTION = 9


def _philox(seed: int, purpose: Purpose, epoch: int, step: int) -> np.random.Philox:
    """Counters count from the low words up, so the high words keep the streams apart."""
    key = np.array([seed & _WORD, purpose], dtype=np.uint64)
    return np.random.Philox(key=key, counter=np.array([0, 0, step, epoch], dtype=np.uint64))


def generator(seed: int, purpose: Purpose, epoch: int = 0, step: int = 0) -> np.random.Generator:
    """The generator of (seed modulo 2**64, purpose, epoch, step)."""
    return np.random.Generator(_philox(seed, purpose, epoch, step))


def sample_seed(seed: int, purpose: Purpose, epoch: int, index: int) -> int:
    """A 32-bit seed (all that torch's CPU generator uses) for what happens to one sample."""
    return int(_philox(seed, purpose, epoch, index).random_raw()) >> 32


def split_selection(
    size: int, fraction: float, max_samples: int, seed: int
) -> tuple[Indices, Indices]:
    """Sorted indices (to train on, to select candidates on) of `size` samples.

    The selection split has fraction x size samples, rounded down, at most `max_samples` and at
    least 1; none when the fraction is 0. Raises DataError when nothing is left to train on.
    """
    wanted = 0 if fraction == 0 else max(1, min(int(fraction * size), max_samples))
    if wanted >= size:
        raise DataError(
            f"data: the training set has {size} samples and the selection split takes {wanted}, "
            f"so none is left to train on; give more samples, or data.selection_fraction: 0 "
            f"(now {fraction})"
        )
    shuffled = generator(seed, Purpose.SELECTION).permutation(size)
    return np.sort(shuffled[wanted:]), np.sort(shuffled[:wanted])


def epoch_order(train: Indices, seed: int, epoch: int) -> Indices:
    """The training indices in the order of this epoch."""
    return generator(seed, Purpose.ORDER, epoch).permutation(train)


class EpochOrders:
    """Orders of the epochs of one training set; remembers the last one asked for."""

    def __init__(self, train: Indices, seed: int) -> None:
        self.train = train
        self._seed = seed
        self._last: tuple[int, Indices] | None = None

    def of(self, epoch: int) -> Indices:
        """The order of an epoch; read, don't write."""
        if self._last is None or self._last[0] != epoch:
            self._last = epoch, epoch_order(self.train, self._seed, epoch)
        return self._last[1]


def share_places(share: int, num_shares: int, global_batch_size: int) -> slice:
    """The places of the global batch that belong to a share.

    Raises ValueError: no such share, or shares of different sizes.
    """
    if not 0 <= share < num_shares or global_batch_size % num_shares:
        raise ValueError(f"share {share} of {num_shares} of {global_batch_size} samples")
    size = global_batch_size // num_shares
    return slice(share * size, (share + 1) * size)


def step_indices(order: Indices, step: int, global_batch_size: int) -> Indices:
    """The samples of one step's global batch. Raises ValueError past the end of the epoch."""
    steps = len(order) // global_batch_size
    if not 0 <= step < steps:
        raise ValueError(f"step {step} of an epoch of {steps} steps")
    return order[step * global_batch_size : (step + 1) * global_batch_size]


def rank_indices(split: Indices, rank: int, world_size: int) -> Indices:
    """Every world_size-th sample, from rank on: over the ranks, each sample exactly once.

    Raises DataError for an empty split, ValueError for a rank that does not exist.
    """
    if len(split) == 0:
        raise DataError(
            "data.selection_fraction: it is 0, so there is no selection split to score on"
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}")
    return split[rank::world_size]


@dataclass(frozen=True, eq=False)
class CropFlip:
    """Where each image [samples] is cropped from its padded self, and whether it is mirrored.

    top, left: int64, 0 .. 2 x padding. flip: bool.
    """

    top: Indices
    left: Indices
    flip: npt.NDArray[np.bool_]

    def take(self, places: slice) -> CropFlip:
        """The part of a share."""
        return CropFlip(self.top[places], self.left[places], self.flip[places])


def draw_crop_flip(
    seed: int, epoch: int, step: int, samples: int, crop_padding: int, flip: bool
) -> CropFlip:
    """The draws for a whole global batch; a place's draw does not depend on `samples`."""
    corners = generator(seed, Purpose.CROP, epoch, step).integers(
        0, 2 * crop_padding + 1, size=(samples, 2)
    )
    mirrored = generator(seed, Purpose.FLIP, epoch, step).random(samples) < 0.5
    return CropFlip(corners[:, 0], corners[:, 1], mirrored & flip)
