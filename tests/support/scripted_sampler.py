"""A utilization sampler with given values."""

from __future__ import annotations

from collections.abc import Sequence


class ScriptedSampler:
    """Returns the given values in order and repeats the last one; raises given exceptions.

    The first call, which begins the first interval, returns none of them.
    """

    def __init__(self, values: Sequence[float | Exception]) -> None:
        self._values: list[float | Exception] = [0.0, *values]

    def __call__(self) -> float:
        value = self._values.pop(0) if len(self._values) > 1 else self._values[0]
        if isinstance(value, Exception):
            raise value
        return value
