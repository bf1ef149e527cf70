"""What every kind of training data offers to the code that trains on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

Split = Literal["selection", "test"]


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples on the device, ready for the model.

    x [samples, ...]: float32, normalised when it came from uint8 images (then [N, C, H, W]).
    y [samples]: int64 class numbers. skipped: samples left out because they are unreadable.
    """

    x: torch.Tensor
    y: torch.Tensor
    skipped: int = 0


@dataclass(frozen=True)
class DataInfo:
    """Sizes of the parts in samples, and the shape of one sample as the model sees it."""

    num_classes: int
    sample_shape: tuple[int, ...]
    train_size: int
    selection_size: int
    test_size: int

    def steps_per_epoch(self, global_batch_size: int) -> int:
        """Whole global batches in one epoch; the rest of the epoch's order is left out."""
        return self.train_size // global_batch_size


class TrainingData(Protocol):
    """Training, selection and test data. One iterator at a time; any phase can be repeated."""

    info: DataInfo
    # Called for each batch between reading it and moving it to the device; probes take times.
    on_copy: Callable[[], None]

    def train(
        self, epoch: int, steps: range, shares: range, num_shares: int, global_batch_size: int
    ) -> Iterator[Batch]:
        """For each step and each share: that share, of `num_shares`, of the global batch.

        The samples and their augmentation depend on (seed, epoch, step, place in the global
        batch) only, not on who computes which share. Raises DataError on unreadable samples.
        """
        ...

    def train_places(
        self,
        epoch: int,
        places: Iterable[tuple[int, int]],
        num_shares: int,
        global_batch_size: int,
    ) -> Iterator[Batch]:
        """The same for any steps and shares, in the order of `places`: (step, share). Loader
        processes ask for places before their batches are wanted.
        """
        ...

    def evaluate(
        self, split: Split, rank: int, world_size: int, batch_size: int
    ) -> Iterator[Batch]:
        """Rank's part of the split without augmentation: over all ranks, each sample once."""
        ...

    def check_samples(self) -> None:
        """Read some samples of each set, to tell before a run what reading all would tell too
        late. Raises DataError.
        """
        ...

    def close(self) -> None:
        """End loader processes, if there are any."""
        ...


def nothing() -> None:
    """The `on_copy` of data that nobody measures."""
