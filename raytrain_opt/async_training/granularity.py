"""Choose into how many micro-batches asynchronous workers cut a step.

Pure. A gradient is about as many updates old as there are workers, whatever the size of an update:
the more updates a step is cut into, the less the weights have moved meanwhile. But each update
costs messages, a call of the network and a call of the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Fraction of the speed that finer micro-batches may cost. They gain more (docs/async.md), and
# phases of equal settings differ by some percent.
_ALLOWED_COST = 0.1


@dataclass
class Granularity:
    """The number of micro-batches per worker and step, higher from phase to phase.

    It stays where the next of `splits` costs more than a tenth of the speed of the fastest phase.
    """

    splits: Sequence[int]
    _position: int = 0
    _fastest: float = 0.0  # samples/s
    _chosen: bool = False

    @property
    def split(self) -> int:
        """Micro-batches of a worker's share of a step in the next phase."""
        return self.splits[self._position]

    def measured(self, samples_per_s: float) -> None:
        """Take the speed of a phase with this split."""
        if self._chosen:
            return
        self._chosen = self._position == len(self.splits) - 1
        if samples_per_s < (1 - _ALLOWED_COST) * self._fastest:
            self._position, self._chosen = self._position - 1, True
        elif not self._chosen:
            self._position += 1
        self._fastest = max(self._fastest, samples_per_s)
