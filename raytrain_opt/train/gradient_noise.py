"""Squared norms of gradients that are computed anyway, for `search.noise_scale`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

# Measuring one update in ten costs below 1 % of the time, even of steps of 6 ms.
MEASURE_EVERY = 10

# (mean squared norm of the micro-batches' gradients, squared norm of their mean).
Pair = tuple[float, float]
# Multiplies a loss before its backward pass: `GradScaler.scale`.
Scale = Callable[[Tensor], Tensor]


class NoiseTracker:
    """Measures every `MEASURE_EVERY`-th step that has at least two micro-batches.

    Counted back from the phase's last step: a phase that goes on after a resume measures the same.

    All ranks must make the same calls. Values stay on the device until the phase ends. With
    SyncBatchNorm the gradients contain parts of other workers' losses, and the measured noise is
    too small.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.begin_phase(0, 0, lambda loss: loss)

    def begin_phase(self, steps: int, count: int, scale: Scale) -> None:
        """Begin a phase of `steps` complete batches, and drop an interrupted one.

        Losses are divided by `count`, the number of micro-batches, and multiplied by `scale`.
        """
        self._count, self._scale = count, scale
        self._remaining = steps
        self._rows: list[Tensor] = []  # [micro-batches + 1]: all squares, and the one of the sum
        self._begin_update()

    def _begin_update(self) -> None:
        counts = self._remaining > 0 and (self._remaining - 1) % MEASURE_EVERY == 0
        self._is_due = self._count > 1 and counts
        if self._is_due:
            row = torch.zeros(self._count + 1, dtype=torch.float64, device=self._device)
            self._row = row

    def add(self, number: int, gradients: Iterable[Tensor]) -> None:
        """Add gradients of a micro-batch, before they are added to others or sent."""
        if self._is_due:
            self._row[number] += _square(gradients)

    def end_update(self, gradients: Iterable[Tensor]) -> None:
        """End an update whose sums are these gradients."""
        if self._is_due:
            self._row[-1] = _square(gradients)
            self._rows.append(self._row / self._scale(torch.ones_like(self._row[-1])).square())
        self._remaining -= 1
        self._begin_update()

    def end_phase(self) -> tuple[Pair, ...]:
        """End the phase; return one pair per measured update."""
        if not self._rows:
            return ()
        own, self._rows = torch.stack(self._rows), []
        squares = own[:, :-1].contiguous()
        dist.all_reduce(squares)  # each has one value that is not 0, so the order does not matter
        pairs = zip(squares.tolist(), own[:, -1].tolist(), strict=True)
        return tuple((sum(row) * self._count, total) for row, total in pairs)


def _square(gradients: Iterable[Tensor]) -> Tensor:
    """Return the squared norm of gradients, float64 []; 0 for none, where a micro-batch raised."""
    norms = [
        torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32))
        for g in gradients
    ]
    return torch.stack(norms).double().square().sum() if norms else torch.zeros(())
