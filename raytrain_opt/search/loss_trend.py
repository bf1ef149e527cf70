"""Sudden rises and plateaus in the mean training losses of the epochs so far."""

from __future__ import annotations

from collections.abc import Sequence

# A loss this many times that of the epoch before is a spike; means over epochs hardly move by
# noise alone.
_SPIKE = 1.1
# This many epochs, none of which reduced the loss by this fraction, are a plateau.
PLATEAU_EPOCHS = 3
_PROGRESS = 0.005


def has_spiked(losses: Sequence[float]) -> bool:
    """Return whether the last epoch's loss is far above that of the epoch before."""
    return len(losses) >= 2 and losses[-1] > _SPIKE * losses[-2]


def has_stalled(losses: Sequence[float]) -> bool:
    """Return whether none of the last epochs was better than the best one before them."""
    before, last = losses[:-PLATEAU_EPOCHS], losses[-PLATEAU_EPOCHS:]
    return bool(before) and min(last) > (1 - _PROGRESS) * min(before)
