"""Numbers for people."""

from __future__ import annotations

import math


def percent(share: float | None, digits: int = 1) -> str:
    """`98.9 %` of 0.989; a dash where it is not known."""
    return "–" if share is None else f"{100 * share:.{digits}f} %"


def rate(value: float | None) -> str:
    """A learning rate."""
    return "–" if value is None else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """`1 h 5 min`, `3 min 20 s`, `12.3 s`, `45 ms`."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 1:
        return f"{1000 * seconds:.{0 if seconds >= 0.01 or not seconds else 2}f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def plain(value: float | None, digits: int = 4) -> str:
    """So many significant digits."""
    if value is not None and abs(value) >= 10**digits:
        return count(value)
    return "–" if value is None else f"{value:.{digits}g}"


def count(value: float | None) -> str:
    """With separators of thousands."""
    return "–" if value is None else f"{value:,.0f}"


def times(number: int, noun: str, ending: str = "s") -> str:
    """`1 round`, `2 rounds`."""
    return f"{number:,} {noun}" + ("" if number == 1 else ending)
