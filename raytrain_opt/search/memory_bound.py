"""What measurements say about memory: which sizes are ruled out, and how to find one that fits.

A size that ran out of memory rules out itself and everything above it.
"""

from __future__ import annotations

from collections.abc import Sequence

from raytrain_opt.errors import ResourcesError
from raytrain_opt.search.batch_size import Ask, Limits, Measurement


def smallest_unfit(history: Sequence[Measurement]) -> int | None:
    """The smallest size that ran out of memory; None when none did."""
    return min((m.batch_size for m in history if not m.fits), default=None)


def largest_open(history: Sequence[Measurement], limits: Limits) -> int:
    """The largest size that is allowed and not ruled out; 0 when none is left."""
    unfit = smallest_unfit(history)
    return limits.largest if unfit is None else min(limits.largest, unfit - 1)


def fitting(history: Sequence[Measurement], limits: Limits) -> list[Measurement]:
    """The measurements that fit and are not ruled out by another one, in their order."""
    largest = largest_open(history, limits)
    return [m for m in history if m.fits and m.batch_size <= largest]


def ask_for_first_fit(history: Sequence[Measurement], limits: Limits, start: int) -> Ask | None:
    """Ask for `start`, then for half of what did not fit; None once a size fits.

    Raises ResourcesError when size 1 does not fit.
    """
    if fitting(history, limits):
        return None
    unfit = smallest_unfit(history)
    if unfit is None:
        return Ask(min(start, limits.largest), "start")
    if unfit == 1:
        raise ResourcesError(
            "batch_size_search: not even a batch of one sample per worker fits into memory; "
            f"tried and out of memory: {', '.join(str(m.batch_size) for m in history)}. Use a "
            "smaller model or input, a lower precision, a device with more memory, or a "
            "smaller batch_size_search.memory_reserve."
        )
    return Ask(unfit // 2, f"half of {unfit}, which did not fit into memory")
