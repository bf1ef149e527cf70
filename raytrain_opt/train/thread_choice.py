"""Choose the number of compute threads by timing training steps.

Threads pay only where an operation takes much longer than it takes to wake them and to wait for
the last one. No rule about sizes holds on two machines; some steps tell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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


def time_threads(
    task: Task, model: nn.Module, samples: Batch, precision: Precision, batch_size: int, most: int
) -> int:
    """Return the threads to train with, at most `most`; times steps of `samples`, repeated."""
    cpu, rows = torch.device("cpu"), torch.arange(batch_size) % samples.size
    x, y = map_leaves(lambda leaf: None if leaf is None else leaf[rows], (samples.x, samples.y))
    content = replace(samples, x=x, y=y).content
    dtype = autocast_dtype(precision, cpu)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = task.training_loss(model, content)
        loss.backward()  # type: ignore[no-untyped-call]

    with preserve_model(model, cpu, task):
        model.train()
        try:
            return fewest_fast_threads(step, most)
        finally:
            model.zero_grad(set_to_none=True)


def fewest_fast_threads(step: Callable[[], None], most: int) -> int:
    """Return the fewest threads, of `most`, its half and so on, that are about as fast as any."""
    times_s: dict[int, list[float]] = {most >> i: [] for i in range(most.bit_length())}
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
        if (step_s := monotonic_s() - began_s) > _SHORT_S:
            break
    return step_s
