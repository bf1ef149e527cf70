"""Numbers as text for people. A dash stands for an unknown number."""

from __future__ import annotations

import math


def percent(fraction: float | None, digits: int = 1) -> str:
    """Return `98.9 %` for 0.989."""
    return "–" if fraction is None else f"{100 * fraction:.{digits}f} %"


def rate(value: float | None) -> str:
    """Return a learning rate."""
    return "–" if value is None else f"{value:.4g}"


def duration(value_s: float | None) -> str:
    """Return `1 h 5 min`, `3 min 20 s`, `12.3 s`, or `45 ms`."""
    if value_s is None or not math.isfinite(value_s):
        return "–"
    if value_s < 1:
        return f"{1000 * value_s:.{0 if value_s >= 0.01 or not value_s else 2}f} ms"
    if value_s < 100:
        return f"{value_s:.1f} s"
    minutes, seconds = divmod(round(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def plain(value: float | None, digits: int = 4) -> str:
    """Return a number with this many significant digits, never in exponential form if large."""
    if value is not None and abs(value) >= 10**digits:
        return count(value)
    return "–" if value is None else f"{value:.{digits}g}"


def count(value: float | None) -> str:
    """Return an integer with thousands separators."""
    return "–" if value is None else f"{value:,.0f}"


def times(number: int, noun: str) -> str:
    """Return `1 round`, `2 rounds`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
