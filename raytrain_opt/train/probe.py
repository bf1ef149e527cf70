"""Measure training at one batch size: speed with its error, where the time goes, memory.

A probe trains for real and then puts everything back: weights, buffers, optimiser, scaler,
gradients, modes and random numbers are bit-identical afterwards. It knows nothing of Ray.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count, islice

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.batch_size import BatchSizeSection
from raytrain_opt.data.base import Batch, nothing
from raytrain_opt.errors import ResourcesError
from raytrain_opt.telemetry.utilization import (
    Sampler,
    ScriptedSampler,
    UtilizationMonitor,
    open_sampler,
)
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.noise import NormMeter
from raytrain_opt.train.probe_result import Probe
from raytrain_opt.train.timing import PARTS, marks_for
from raytrain_opt.train.totals import GradientNorms
from raytrain_opt.train.untouched import untouched

_MIB = 1024**2
_EVALUATION_STEPS = 3
# Slow steps: so many seconds of warming up, or timed, are enough, but that many steps.
_WARM_S, _TIMED_S, _LEAST_STEPS = 0.5, 1.0, 2
# What is believed of the spread of steps before any is seen, and how many steps that counts for.
_USUAL_SPREAD, _USUAL_WEIGHT = 0.03, 3
# Of the gradient noise: batches and samples of a large gradient, and such gradients.
_LEAST_SHARES, _MOST_SHARES, _NOISE_SAMPLES = 2, 32, 256
_LEAST_LARGE, _MOST_LARGE = 2, 8
# How torch, cuDNN, cuBLAS and the CPU allocator say that memory is out, apart from
# torch.OutOfMemoryError.
_MEMORY_TEXTS = (
    "out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "not enough memory",
)


@dataclass
class Subject:
    """What is trained in a probe. `batches(size, on_copy)` is endless, on the device, and calls
    `on_copy` between reading a batch and moving it to the device.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Tensor, Tensor], Tensor]
    batches: Callable[[int, Callable[[], None]], Iterator[Batch]]
    device: torch.device
    autocast: Callable[[], AbstractContextManager[object]]
    scaler: torch.amp.GradScaler
    # Evaluation steps at this batch size; only the check of the chosen size does them.
    evaluate: Callable[[int], None] = lambda _: None


def subject_of(learner: Learner) -> Subject:
    """A job's own model, optimiser, loss and input pipeline."""

    def batches(size: int, on_copy: Callable[[], None]) -> Iterator[Batch]:
        learner.data.on_copy = on_copy
        steps = learner.info.steps_per_epoch(size)
        for epoch in count(1):
            yield from learner.data.train(epoch, range(steps), range(1), 1, size)

    def evaluate(size: int) -> None:
        learner.data.on_copy = nothing
        given = learner.job.evaluate.batch_size_per_worker or max(size, 256)
        with torch.no_grad():
            for batch in islice(learner.data.evaluate("test", 0, 1, given), _EVALUATION_STEPS):
                with learner.autocast():
                    learner.loss(learner.model(batch.x), batch.y)

    return Subject(
        learner.model,
        learner.optimizer,
        learner.loss,
        batches,
        learner.device,
        learner.autocast,
        learner.scaler,
        evaluate,
    )


def measure(
    subject: Subject,
    batch_size: int,
    section: BatchSizeSection,
    sampler: Sampler,
    *,
    steps_factor: int = 1,
    trace: str | None = None,
) -> Probe:
    """Train at `batch_size` until the speed is known to `section.precision`, then undo it.

    `steps_factor`: so many times the least number of steps, and evaluation too (the check of
    a choice). `trace`: file for a Chrome trace of the timed steps. Running out of memory is
    a result, not an error.
    """
    try:
        with untouched(subject.model, subject.optimizer, subject.scaler, subject.device):
            return _measured(subject, batch_size, section, sampler, steps_factor, trace)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
    # After the block, so that the error's frames hold no tensors any more.
    if subject.device.type == "cuda":
        torch.cuda.empty_cache()
    return Probe(batch_size, "out_of_memory", why=why)


def sampler_of(section: BatchSizeSection, device: torch.device, threads: int) -> Sampler:
    """For probes on `device`. Raises JobError or ResourcesError when it cannot be had."""
    if device.type != "cuda":
        return open_sampler(section.utilization, use_gpu=False, threads=threads)
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    try:
        return open_sampler(section.utilization, use_gpu=True, threads=threads, gpu_uuid=uuid)
    except ResourcesError:
        # A GPU that NVML cannot watch (MIG): only a strategy that steers by it has to know.
        if section.strategy == "gpu_usage_maximize" or section.utilization.sampler != "auto":
            raise
        return ScriptedSampler([math.nan])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that device or host memory is used up."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MEMORY_TEXTS)


def _measured(
    subject: Subject,
    batch_size: int,
    section: BatchSizeSection,
    sampler: Sampler,
    steps_factor: int,
    trace: str | None,
) -> Probe:
    memory = _Memory(subject.device, section.memory_reserve)
    loop = _Loop(subject, batch_size)
    subject.model.train()
    loop.run(section.warmup_steps, _WARM_S)
    with ExitStack() as stack:
        if trace is not None:
            stack.enter_context(_traced(subject.device, trace))
        monitor = stack.enter_context(UtilizationMonitor(sampler, section.utilization.period_s))
        loop.begin()
        while not _enough(loop.step_seconds(), section, steps_factor):
            loop.run(section.min_steps, _TIMED_S, least=_LEAST_STEPS)
    step_s, parts_s = loop.step_seconds(), loop.part_seconds()
    norms = loop.norms(batch_size, len(step_s)) if section.measures_noise else None
    if steps_factor > 1:
        subject.model.eval()
        subject.evaluate(batch_size)
    mean_s, error_s = mean_and_error(step_s)
    rate, samples = batch_size / mean_s, batch_size * len(step_s)
    why = memory.used_up()
    return Probe(
        batch_size,
        "out_of_memory" if why else "ok",
        samples_per_s=rate,
        samples_per_s_error=rate * error_s / mean_s,
        steps=len(step_s),
        seconds=sum(step_s),
        parts_s=parts_s,
        utilization_pct=monitor.top_half_mean_pct,
        utilization_mean_pct=monitor.mean_pct,
        utilization_samples=len(monitor.samples),
        peak_memory_mib=memory.peak_bytes() / _MIB,
        joule_per_sample=None if monitor.energy_j is None else monitor.energy_j / samples,
        norms=norms,
        why=why,
    )


class _Loop:
    """Training steps with a mark between their parts."""

    def __init__(self, subject: Subject, batch_size: int) -> None:
        self._subject = subject
        self._marks = marks_for(subject.device)
        self._batches = subject.batches(batch_size, self._marks.set)

    def begin(self) -> None:
        """From here on steps count."""
        self._marks.clear()
        self._marks.set()

    def run(self, steps: int, limit_s: float, least: int = 1) -> None:
        """So many steps; when they take longer than the limit not so many, but `least`."""
        started_s = monotonic_s()
        for done in range(steps):
            if done >= least and monotonic_s() - started_s > limit_s:
                return
            self._step()

    def _step(self) -> None:
        """One update: wait for data, copy, forward, backward, update."""
        subject, mark = self._subject, self._marks.set
        batch = next(self._batches)  # sets a mark between waiting and copying
        mark()
        subject.optimizer.zero_grad(set_to_none=True)
        with subject.autocast():
            loss = subject.loss(subject.model(batch.x), batch.y)
        mark()
        subject.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        mark()
        subject.scaler.step(subject.optimizer)
        subject.scaler.update()
        mark()

    def norms(self, batch_size: int, batches: int) -> GradientNorms:
        """Of gradients at the present weights, from about so many batches.

        A job's probes train at rate 0, so these are its start weights, and the noise scale is
        that of the start. It grows while a training goes on, often more than tenfold: what is
        chosen by it is small rather than large. Unlike in a step, gradients stay while the next
        batch is computed, which takes their memory.
        """
        shares = min(max(_LEAST_SHARES, math.ceil(_NOISE_SAMPLES / batch_size)), _MOST_SHARES)
        large = min(max(_LEAST_LARGE, batches // shares), _MOST_LARGE)
        meter = NormMeter(self._subject.model)
        pairs = torch.stack([self._pair(meter, shares) for _ in range(large)]).tolist()
        found = tuple((own, whole) for own, whole in pairs)
        return GradientNorms(batch_size, shares * batch_size, found)

    def _pair(self, meter: NormMeter, shares: int) -> Tensor:
        """Squared norms of the gradients of several batches, and of their mean."""
        subject = self._subject
        subject.optimizer.zero_grad(set_to_none=True)
        for batch in islice(self._batches, shares):
            with subject.autocast():
                loss = subject.loss(subject.model(batch.x), batch.y) / shares
            with meter.share():
                subject.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return meter.finish(shares, subject.scaler.scale)

    def step_seconds(self) -> list[float]:
        """Of each counted step, from the end of the one before."""
        gaps, parts = self._marks.gaps_s(), len(PARTS)
        return [sum(gaps[at : at + parts]) for at in range(0, len(gaps), parts)]

    def part_seconds(self) -> dict[str, float]:
        """Mean over the counted steps."""
        gaps, parts = self._marks.gaps_s(), len(PARTS)
        return {name: float(np.mean(gaps[at::parts])) for at, name in enumerate(PARTS)}


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error; infinite for a single value.

    The spread of a few values is itself uncertain: the usual spread of steps counts as a few
    more of them, which matters less the more there are.
    """
    mean, n = float(np.mean(values)) if values else math.nan, len(values)
    if n < _LEAST_STEPS:
        return mean, math.inf
    usual = _USUAL_WEIGHT * (_USUAL_SPREAD * mean) ** 2
    variance = (usual + (n - 1) * float(np.var(values, ddof=1))) / (_USUAL_WEIGHT + n - 1)
    return mean, math.sqrt(variance / n)


def _enough(step_s: list[float], section: BatchSizeSection, factor: int) -> bool:
    """Whether the speed is known well enough, or the time is up."""
    total_s = sum(step_s)
    if len(step_s) < _LEAST_STEPS:
        return False
    if total_s >= section.max_seconds * factor:
        return True
    # A strategy that looks at utilisation needs a few samples of it.
    looks = section.strategy == "gpu_usage_maximize"
    least_s = 3 * section.utilization.period_s if looks else 0.0
    mean_s, error_s = mean_and_error(step_s)
    known = error_s <= section.precision * mean_s
    many = len(step_s) >= section.min_steps * factor or total_s >= _TIMED_S * factor
    return known and total_s >= least_s and many


class _Memory:
    """What a probe takes of the device's memory; without a GPU, of the host's."""

    def __init__(self, device: torch.device, reserve: float) -> None:
        self._device, self._reserve = device, reserve
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)

    def peak_bytes(self) -> int:
        """Of this process: the largest so far on a GPU; on the host, what it has now."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._device)
        return int(psutil.Process().memory_info().rss)

    def used_up(self) -> str:
        """Why the reserve is not kept; empty when it is."""
        if self._device.type == "cuda":
            _, total = torch.cuda.mem_get_info(self._device)
            left = total - self.peak_bytes()
        else:
            host = psutil.virtual_memory()
            total, left = host.total, host.available
        if left >= self._reserve * total:
            return ""
        return (
            f"{left / _MIB:,.0f} of {total / _MIB:,.0f} MiB were left, less than "
            f"memory_reserve: {self._reserve:g}"
        )


@contextmanager
def _traced(device: torch.device, path: str) -> Iterator[None]:
    """A Chrome trace of what is done inside, for chrome://tracing or Perfetto."""
    from torch.profiler import ProfilerActivity, profile

    gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *gpu]) as profiler:
        yield
    profiler.export_chrome_trace(path)
