"""Share the micro-batches of each step in proportion to the speeds of the workers.

Synchronous training takes as long as its slowest worker. With more micro-batches than workers,
a worker of speed v_w computes a fraction v_w / sum(v) of them, and all finish at the same time;
DDP's mean over unequal shares is computed in `train.micro_batches`. The speeds are measured while
training: from the end of an update to the moment when a worker's last gradient is ready, which
includes its wait for data and leaves out its wait for others and the first update of a phase.
Source: Chen, Wang and others, Semi-Dynamic Load Balancing: Efficient Distributed Learning in
Non-Dedicated Environments, SoCC 2020, which shares samples rather than micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from raytrain_opt.train.micro_batches import MicroBatches
from raytrain_opt.train.step_timer import step_timer_for

# Updates between two measurements. Reading the times waits for a GPU once.
MEASURE_EVERY = 5
# Weight of the latest measurement: a slow second must not change the shares of a minute.
_SMOOTHING = 0.5


class LoadBalance:
    """Decides which micro-batches each rank computes. All ranks make the same calls.

    This class has shares for given speeds, the same in every step: repeatable to the bit.
    """

    def __init__(self, speeds: Sequence[float]) -> None:
        self.speeds = speeds

    def begin_phase(self, count: int, read_ahead: Callable[[], int]) -> None:
        """Begin a phase with `count` micro-batches per update.

        Loader processes request up to `read_ahead` of them early.
        """
        self._indices = self._share(count)

    def indices(self, update: int) -> range:
        """Return the micro-batches of this rank in an update of the phase, from 0."""
        return self._indices

    def on_gradients(self) -> None:
        """Call this when all gradients of an update are computed, before they are received."""

    def after_update(self) -> None:
        """Call this after each update."""

    def end_phase(self) -> None:
        """End the phase."""

    def _share(self, count: int) -> range:
        return MicroBatches.for_rank(dist.get_rank(), self.speeds, count).indices


class MeasuredShares(LoadBalance):
    """Shares for the speeds measured so far, the same on all ranks.

    A new measurement counts from the update on that no loader process has requested yet.
    """

    def __init__(self, world_size: int, device: torch.device) -> None:
        super().__init__([1.0] * world_size)
        self._device, self._timer = device, step_timer_for(device)

    def begin_phase(self, count: int, read_ahead: Callable[[], int]) -> None:
        self._count, self._read_ahead = count, read_ahead
        self._plans = [(0, self._share(self._count))]
        self._updates = 0
        self._begin_measurement()

    def indices(self, update: int) -> range:
        """Return the micro-batches of this rank in an update of the phase."""
        return next(share for first, share in reversed(self._plans) if first <= update)

    def on_gradients(self) -> None:
        """Note the time."""
        self._timer.mark()

    def after_update(self) -> None:
        """Note the time; exchange measurements every few updates."""
        self._computed += len(self.indices(self._updates))
        self._updates += 1
        self._timer.mark()
        if self._updates == 1:  # it waited for loaders to start, kernels to be chosen, compiling
            self._begin_measurement()
        elif self._updates % MEASURE_EVERY == 0:
            # A worker requests at least one micro-batch per update.
            first = self._updates + self._measure()
            self._plans.append((first, self._share(self._count)))

    def end_phase(self) -> None:
        """Measure the latest updates, for the next phase."""
        if self._computed:
            self._measure()

    def _measure(self) -> int:
        """Exchange speeds; return how many micro-batches any worker requests early."""
        # Intervals alternate between computing and the wait for others, with the update.
        seconds = sum(self._timer.intervals_s()[::2]) / self._computed
        self._begin_measurement()
        message = torch.zeros(2, len(self.speeds), dtype=torch.float64, device=self._device)
        message[:, dist.get_rank()] = torch.tensor([seconds, self._read_ahead()])
        dist.all_reduce(message)
        times_s, read_ahead = message.tolist()
        new = [1 / second for second in times_s]
        weight = 1.0 if set(self.speeds) == {1.0} else _SMOOTHING  # 1: not measured yet
        pairs = zip(self.speeds, new, strict=True)
        self.speeds = [(1 - weight) * old + weight * latest for old, latest in pairs]
        return int(max(read_ahead))

    def _begin_measurement(self) -> None:
        self._computed = 0
        self._timer.reset()
        self._timer.mark()
