"""Measure training at one batch size (speed, time per part, memory) and restore everything."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice, product
from statistics import fmean
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.batch_size import BatchSizeSection
from raytrain_opt.data.base import Batch, no_op
from raytrain_opt.errors import ResourcesError
from raytrain_opt.models.factory import preserve_model
from raytrain_opt.monitoring import (
    Sampler,
    cpu_sampler,
    gpu_sampler,
    top_half_mean,
    watch_utilization,
)
from raytrain_opt.optim.averaging import use_weights
from raytrain_opt.optim.update import update_weights
from raytrain_opt.results import Probe
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.micro_batches import STEP_PARTS, step_timer_for
from raytrain_opt.train.phase import is_out_of_memory
from raytrain_opt.train.state import capture, restore

_MIB = 1024**2
# Steps before timing starts, and the least number of timed steps.
_WARMUP_STEPS, _TIMED_STEPS = 3, 5
_EVALUATION_STEPS = 3  # enough to allocate the memory that evaluation needs
# With slow steps, this much training is enough, but two steps: a standard error needs two values.
_WARMUP_S, _TIMED_S, _MIN_STEPS = 0.5, 1.0, 2
# A strategy that reads the utilization needs a few samples of it.
_MIN_UTILIZATION_SAMPLES = 3
# Prior for the relative spread of step times, and the number of steps it counts as.
_PRIOR_SPREAD, _PRIOR_STEPS = 0.03, 3


@dataclass
class ProbedTraining:
    """The training that a probe measures; `loss` returns the mean over a batch.

    `batches(size, on_copy)` yields batches on the device without end; calls `on_copy` before each
    copy to the device.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Batch], Tensor]
    batches: Callable[[int, Callable[[], None]], Iterator[Batch]]
    device: torch.device
    autocast: Callable[[], AbstractContextManager[object]]
    scaler: torch.amp.GradScaler
    # Runs a few evaluation steps at a training batch size.
    evaluate: Callable[[int], None] = lambda _: None
    clip_norm: float | None = None


def probed_training(learner: Learner) -> ProbedTraining:
    def batches(size: int, on_copy: Callable[[], None]) -> Iterator[Batch]:
        learner.data.on_copy = on_copy
        steps = learner.info.steps_per_epoch(size)
        for epoch in count(1):
            yield from learner.data.train_batches(epoch, product(range(steps), range(1)), 1, size)

    def evaluate(size: int) -> None:
        learner.data.on_copy, workers = no_op, learner.config.worker_count
        batch_size = replace(learner.config, global_batch_size=size * workers).eval_batch_size
        batches = learner.data.eval_batches("test", 0, 1, batch_size)
        with torch.no_grad():
            for batch in islice(batches, _EVALUATION_STEPS):
                with learner.autocast():
                    learner.task.validation_metrics(learner.model, batch.content)

    return ProbedTraining(
        learner.model,
        learner.optimizer,
        lambda batch: learner.task.training_loss(learner.model, batch.content),
        batches,
        learner.device,
        learner.autocast,
        learner.scaler,
        evaluate,
        learner.clip_norm,
    )


def measure(
    training: ProbedTraining,
    batch_size: int,
    section: BatchSizeSection,
    sampler: Sampler,
    *,
    steps_factor: int = 1,
) -> Probe:
    """Train at `batch_size` until the speed is known to `section.relative_error`, then undo it.

    Running out of memory is a result, not an error. `steps_factor`: of the least number of steps.
    """
    try:
        with _preserve(training):
            use_weights(training.optimizer, training=True)
            return _measure(training, batch_size, section, sampler, steps_factor)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
    # After the except block, when the error's frames no longer hold tensors.
    if training.device.type == "cuda":
        torch.cuda.empty_cache()
    return Probe(batch_size, "out_of_memory", why=why)


def open_probe_sampler(section: BatchSizeSection, device: torch.device, threads: int) -> Sampler:
    """Open a sampler for probes on `device`. Raises ResourcesError."""
    if device.type != "cuda":
        return cpu_sampler(threads)
    try:
        return gpu_sampler(str(torch.cuda.get_device_properties(device).uuid))
    except ResourcesError:
        # NVML cannot watch this GPU (MIG). Only a strategy that needs utilization must fail.
        if section.needs_utilization:
            raise
        return lambda: math.nan


@contextmanager
def _preserve(training: ProbedTraining) -> Iterator[None]:
    model, optimizer, scaler = training.model, training.optimizer, training.scaler
    state = capture(model, optimizer, scaler, copy=True)
    gradients = [parameter.grad for parameter in model.parameters()]
    try:
        with preserve_model(model, training.device):
            yield
    finally:
        restore(state, model, optimizer, scaler)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient


def _measure(
    training: ProbedTraining,
    batch_size: int,
    section: BatchSizeSection,
    sampler: Sampler,
    steps_factor: int,
) -> Probe:
    if training.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(training.device)
    loop = _Loop(training, batch_size)
    training.model.train()
    loop.run(_WARMUP_STEPS, _WARMUP_S)
    with watch_utilization(sampler, section.utilization_period_s) as utilization:
        loop.timer.begin()
        while not _is_precise(loop.step_times_s(), len(utilization), section, steps_factor):
            loop.run(_TIMED_STEPS, _TIMED_S, min_steps=_MIN_STEPS)
    step_s, part_s = loop.step_times_s(), loop.timings_s().mean(axis=0)
    if steps_factor > 1:  # the check of a choice, of which the memory of evaluations is a part
        training.model.eval()
        training.evaluate(batch_size)
    mean_s, error_s = mean_and_error(step_s)
    rate = batch_size / mean_s
    why = _missing_memory(training.device, section.memory_reserve)
    return Probe(
        batch_size,
        "out_of_memory" if why else "ok",
        samples_per_s=rate,
        samples_per_s_error=rate * error_s / mean_s,
        steps=len(step_s),
        duration_s=sum(step_s),
        timings_s=dict(zip(STEP_PARTS, part_s.tolist(), strict=True)),
        utilization_pct=top_half_mean(utilization),
        utilization_mean_pct=fmean(utilization),
        peak_memory_mib=_peak_memory_bytes(training.device) / _MIB,
        why=why,
    )


class _Loop:
    def __init__(self, training: ProbedTraining, batch_size: int) -> None:
        self._training = training
        self.timer = step_timer_for(training.device)
        self._batches = training.batches(batch_size, self.timer.mark)

    def run(self, steps: int, limit_s: float, min_steps: int = 1) -> None:
        """Run up to `steps` steps; after `limit_s`, stop once `min_steps` are done."""
        started_s = monotonic_s()
        for step in range(steps):
            if step >= min_steps and monotonic_s() - started_s > limit_s:
                return
            self._step()

    def _step(self) -> None:
        training, mark = self._training, self.timer.mark
        batch = next(self._batches)  # marks the time between waiting and copying
        mark()
        training.optimizer.zero_grad(set_to_none=True)
        with training.autocast():
            loss = training.loss(batch)
        mark()
        training.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        mark()
        update_weights(training.optimizer, training.scaler, training.clip_norm)
        mark()

    def timings_s(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return the seconds, [step, part]."""
        return np.reshape(self.timer.intervals_s(), (-1, len(STEP_PARTS)))

    def step_times_s(self) -> list[float]:
        """Return the seconds of each timed step, from the end of the step before."""
        return [float(step_s) for step_s in self.timings_s().sum(axis=1)]


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Return the mean and its standard error, which is infinite for a single value.

    The spread of a few values is itself uncertain: a prior spread counts as a few more values.
    """
    mean, n = float(np.mean(values)) if values else math.nan, len(values)
    if n < _MIN_STEPS:
        return mean, math.inf
    prior = _PRIOR_STEPS * (_PRIOR_SPREAD * mean) ** 2
    variance = (prior + (n - 1) * float(np.var(values, ddof=1))) / (_PRIOR_STEPS + n - 1)
    return mean, math.sqrt(variance / n)


def _is_precise(
    step_s: list[float], utilization_samples: int, section: BatchSizeSection, factor: int
) -> bool:
    total_s = sum(step_s)
    if len(step_s) < _MIN_STEPS:
        return False
    if total_s >= section.max_probe_s * factor:
        return True
    if section.needs_utilization and utilization_samples < _MIN_UTILIZATION_SAMPLES:
        return False
    mean_s, error_s = mean_and_error(step_s)
    precise = error_s <= section.relative_error * mean_s
    enough = len(step_s) >= _TIMED_STEPS * factor or total_s >= _TIMED_S * factor
    return precise and enough


def _peak_memory_bytes(device: torch.device) -> int:
    """Return the peak of this process on a GPU; on CPU, what the process uses now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return int(psutil.Process().memory_info().rss)


def _missing_memory(device: torch.device, reserve: float) -> str:
    """Return why less than the reserve of the GPU's or the node's memory is free, or ""."""
    if device.type == "cuda":
        now_free, total = torch.cuda.mem_get_info(device)
        # Less by what others use: the context, NCCL, a slot beside a worker.
        free = now_free + torch.cuda.memory_reserved(device) - _peak_memory_bytes(device)
    else:
        memory = psutil.virtual_memory()
        total, free = memory.total, memory.available
    if free >= reserve * total:
        return ""
    return (
        f"{free / _MIB:,.0f} of {total / _MIB:,.0f} MiB were free, less than "
        f"memory_reserve: {reserve:g}"
    )
