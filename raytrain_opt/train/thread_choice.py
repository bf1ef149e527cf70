"""Choose the number of compute threads by timing training steps.

Threads pay only where an operation takes much longer than it takes to wake them and to wait for
the last one. No rule about sizes holds on two machines; some steps tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import nn

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.schema import Precision
from raytrain_opt.data.base import Batch
from raytrain_opt.data.nesting import map_leaves
from raytrain_opt.models.factory import preserve_model
from raytrain_opt.train.kernels import autocast_dtype
from raytrain_opt.train.task import Task

# The noise of a machine comes and goes, so each number of threads is timed in every round.
_ROUNDS = 15
_SHORT_S = 0.02  # a step that takes longer is timed once in a round
_LIMIT_S = 1.0  # no round begins later
# More threads have to save this part of the time; others may need their cores.
_GAIN = 0.05


@dataclass(frozen=True)
class StepTimer:
    """Times training steps on the CPU, of `samples` repeated to a batch; changes nothing."""

    task: Task
    model: nn.Module
    samples: Batch
    precision: Precision

    def __call__(self, batch_size: int, most: int) -> int:
        """Return the number of threads, at most `most`, for training with a batch size."""
        with self._step(batch_size) as step:
            return fewest_fast_threads(step, most)

    def step_s(self, batch_size: int) -> float:
        """Return the seconds of a step with the current number of threads."""
        with self._step(batch_size) as step:
            return _time_s(step)

    @contextmanager
    def _step(self, batch_size: int) -> Iterator[Callable[[], None]]:
        cpu, rows = torch.device("cpu"), torch.arange(batch_size) % self.samples.size
        pair = (self.samples.x, self.samples.y)
        x, y = map_leaves(lambda leaf: None if leaf is None else leaf[rows], pair)
        content = replace(self.samples, x=x, y=y).content
        dtype = autocast_dtype(self.precision, cpu)

        def step() -> None:
            self.model.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = self.task.training_loss(self.model, content)
            loss.backward()  # type: ignore[no-untyped-call]

        with preserve_model(self.model, cpu, self.task):
            self.model.train()
            try:
                yield step
            finally:
                self.model.zero_grad(set_to_none=True)


def fewest_fast_threads(step: Callable[[], None], most: int) -> int:
    """Return the fewest threads, of `most`, its half and so on, that are about as fast as any."""
    numbers = [most]
    while numbers[-1] > 1:
        numbers.append(numbers[-1] // 2)
    times_s: dict[int, list[float]] = {threads: [] for threads in numbers}
    before, end_s = torch.get_num_threads(), monotonic_s() + _LIMIT_S
    try:
        for _ in range(_ROUNDS):
            for threads, measured in times_s.items():
                torch.set_num_threads(threads)
                measured.append(_time_s(step))
            if monotonic_s() > end_s:
                break
    finally:
        torch.set_num_threads(before)
    typical_s = {threads: median(measured) for threads, measured in times_s.items()}
    fast_s = min(typical_s.values()) / (1 - _GAIN)
    return min(threads for threads, step_s in typical_s.items() if step_s <= fast_s)


def _time_s(step: Callable[[], None]) -> float:
    """Return the seconds of a step, after one that is not counted unless it takes long."""
    for _ in range(2):
        began_s = monotonic_s()
        step()
        step_s = monotonic_s() - began_s
        if step_s > _SHORT_S:
            break
    return step_s
