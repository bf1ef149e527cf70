"""Squared norms of the gradients that data parallelism computes anyway: what `search.noise_scale`
needs. Nothing here changes a gradient or waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

# One of so many updates is looked at: that costs below 1 % of the time even of steps of 6 ms.
EVERY = 10

Pair = tuple[float, float]
# What a loss is multiplied by before its backward pass: `GradScaler.scale`.
Scale = Callable[[Tensor], Tensor]


class NormMeter:
    """Looks at one update: at the gradient of each share, and at the one that it is made with.

    A share's gradients are seen on their way into `grad`, before anything is added to them or
    sent, and so without a copy. (With SyncBatchNorm they hold parts of other workers' losses:
    there the noise comes out too small.)
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._norms: list[Tensor] = []

    @contextmanager
    def share(self) -> Iterator[None]:
        """Around the backward pass of one share."""
        hooks = [p.register_hook(self._note) for p in self._parameters]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def finish(self, shares: float, scale: Scale) -> Tensor:
        """[mean of the shares' squared norms, squared norm of their mean], float64, on the device.

        To be called when `grad` holds the mean over all shares. Their losses were divided by
        `shares`: how many a worker has, on average.
        """
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        own = torch.stack(self._norms).double().square().sum() * shares
        whole = get_total_norm(gradients).double().square()
        self._norms.clear()
        return torch.stack((own, whole)) / scale(torch.ones_like(own)).square()

    def _note(self, gradient: Tensor) -> None:
        self._norms.append(torch.linalg.vector_norm(gradient, dtype=torch.float32))


class NoiseWatch(Protocol):
    """Looks at some updates of a phase of training."""

    def begin(self, shares: float, scale: Scale) -> None:
        """A phase begins; a worker's updates are made of `shares` shares, on average."""
        ...

    def share(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one share; `last`: the last one of an update."""
        ...

    def finish(self) -> tuple[Pair, ...]:
        """The phase is over: what `NormMeter.finish` saw, over all workers."""
        ...


class NoWatch:
    """Nothing is looked at."""

    def begin(self, shares: float, scale: Scale) -> None:
        """Nothing to prepare."""

    def share(self, last: bool) -> AbstractContextManager[None]:
        """Nothing to look at."""
        return nullcontext()

    def finish(self) -> tuple[Pair, ...]:
        """Nothing was seen."""
        return ()


class GroupWatch:
    """Every `EVERY`-th update of the process group, where an update has two shares or more.

    All ranks must call it alike. Pairs stay on the device until the phase ends; then one message
    averages them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._world_size = model, dist.get_world_size()
        self.begin(0, lambda one: one)

    def begin(self, shares: float, scale: Scale) -> None:
        """See `NoiseWatch`. What a phase that broke off has left is forgotten."""
        self._shares, self._scale = shares, scale
        self._meter = NormMeter(self._model)
        self._updates = 0
        self._pairs: list[Tensor] = []

    @contextmanager
    def share(self, last: bool) -> Iterator[None]:
        """See `NoiseWatch`."""
        due = self._shares * self._world_size > 1 and self._updates % EVERY == 0
        with self._meter.share() if due else nullcontext():
            yield
        if last:
            self._updates += 1
            if due:
                self._pairs.append(self._meter.finish(self._shares, self._scale))

    def finish(self) -> tuple[Pair, ...]:
        """See `NoiseWatch`. The whole gradient is the same on all workers."""
        if not self._pairs:
            return ()
        pairs = torch.stack(self._pairs)
        dist.all_reduce(pairs)
        self._pairs = []
        own_and_whole = (pairs / self._world_size).tolist()
        return tuple((own, whole) for own, whole in own_and_whole)
