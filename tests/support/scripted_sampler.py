"""A utilization sampler with given values."""

from __future__ import annotations

from collections.abc import Sequence

from raytrain_opt.monitoring import Sampler


class ScriptedSampler(Sampler):
    """Returns the given values in order and repeats the last one; raises given exceptions."""

    def __init__(
        self, values: Sequence[float | Exception], energies_j: Sequence[float | None] = (None,)
    ) -> None:
        self._values, self._energies_j = list(values), list(energies_j)
        self.closed = False

    def sample(self) -> float:
        value = self._values.pop(0) if len(self._values) > 1 else self._values[0]
        if isinstance(value, Exception):
            raise value
        return value

    def energy_j(self) -> float | None:
        return self._energies_j.pop(0) if len(self._energies_j) > 1 else self._energies_j[0]

    def close(self) -> None:
        self.closed = True
