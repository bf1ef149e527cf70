"""Choose into how many micro-batches asynchronous workers cut a step.

Pure. A gradient is about as many updates old as there are workers, whatever the size of an update:
the more updates a step is cut into, the less the weights have moved meanwhile. But each update
costs messages, a call of the network and a call of the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Fraction of the speed that finer micro-batches may cost. They gain more (docs/async.md), and
# phases of equal settings differ by some percent.
_ALLOWED_COST = 0.1


@dataclass
class Granularity:
    """The number of micro-batches per worker and step, from the phases so far.

    `splits`: possible numbers, from low to high. The second phase has as many as hide their
    messages, as the first one measured them. Later ones have fewer until a phase is about as fast
    as the fastest.
    """

    splits: Sequence[int]
    _position: int = 0
    _fastest: float = 0.0  # samples/s
    _chosen: bool = False

    @property
    def split(self) -> int:
        """Micro-batches of a worker's share of a step in the next phase."""
        return self.splits[self._position]

    def measured(self, samples_per_s: float, message_share: float) -> None:
        """Take the speed of a phase with this split.

        `message_share`: the time in which weights arrive or a gradient is applied, whichever is
        longer, as a fraction of that of a micro-batch.
        """
        if not samples_per_s:
            return  # no step was left for the phase of a run that was resumed in its evaluation
        if not self._fastest:
            hidden = self.split / message_share if message_share else math.inf
            self._position = max([0, *(i for i, n in enumerate(self.splits) if n <= hidden)])
        elif not self._chosen and samples_per_s < (1 - _ALLOWED_COST) * self._fastest:
            self._position = max(0, self._position - 1)
        else:
            self._chosen = True
        self._fastest = max(self._fastest, samples_per_s)
