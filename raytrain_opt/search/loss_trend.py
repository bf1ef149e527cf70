"""What the mean training losses of the epochs so far tell: a sudden rise, or no progress."""

from __future__ import annotations

from collections.abc import Sequence

# So much higher than the epoch before is a spike; means over epochs hardly move by noise.
_SPIKE = 1.1
# So many epochs that gained less than this share are a plateau.
PLATEAU_EPOCHS = 3
_PROGRESS = 0.005


def has_spiked(losses: Sequence[float]) -> bool:
    """Whether the last epoch's loss is far above that of the epoch before."""
    return len(losses) >= 2 and losses[-1] > _SPIKE * losses[-2]


def has_stalled(losses: Sequence[float]) -> bool:
    """Whether none of the last epochs was better than the best one before them."""
    before, last = losses[:-PLATEAU_EPOCHS], losses[-PLATEAU_EPOCHS:]
    return bool(before) and min(last) > (1 - _PROGRESS) * min(before)
