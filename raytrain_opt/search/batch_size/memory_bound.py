"""Memory limits of a batch-size search: sizes that cannot fit, and a first size that fits.

A size that ran out of memory rules out itself and everything above it.
"""

from __future__ import annotations

from collections.abc import Sequence

from raytrain_opt.errors import ResourcesError
from raytrain_opt.search.batch_size.strategy import Measurement, ProbeRequest, SizeBounds


def smallest_unfit(history: Sequence[Measurement]) -> int | None:
    """Return the smallest size that ran out of memory, or None."""
    return min((m.batch_size for m in history if not m.fits), default=None)


def largest_open(history: Sequence[Measurement], bounds: SizeBounds) -> int:
    """Return the largest size that is allowed and not ruled out; 0 if there is none."""
    unfit = smallest_unfit(history)
    return bounds.largest if unfit is None else min(bounds.largest, unfit - 1)


def fitting(history: Sequence[Measurement], bounds: SizeBounds) -> list[Measurement]:
    """Return the measurements that fit and that no later one ruled out, in their order."""
    largest = largest_open(history, bounds)
    return [m for m in history if m.fits and m.batch_size <= largest]


def request_first_fit(
    history: Sequence[Measurement], bounds: SizeBounds, initial: int
) -> ProbeRequest | None:
    """Request `initial`, then half of the size that did not fit; None once a size fits.

    Raises ResourcesError if size 1 does not fit.
    """
    if fitting(history, bounds):
        return None
    unfit = smallest_unfit(history)
    if unfit is None:
        return ProbeRequest(min(initial, bounds.largest), "initial size")
    if unfit == 1:
        raise ResourcesError(
            "batch_size_search: not even a batch of one sample per worker fits into memory; "
            f"out of memory: {', '.join(str(m.batch_size) for m in history)}. Use a "
            "smaller model or input, a lower precision, a device with more memory, or a "
            "smaller batch_size_search.memory_reserve."
        )
    return ProbeRequest(unfit // 2, f"half of {unfit}, which did not fit into memory")
