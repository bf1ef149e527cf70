"""What one worker computes: seconds and bytes of an update, as functions of its batch.

    seconds = update_s + samples x sample_s        bytes = fixed_bytes + samples x sample_bytes

Measured by the records of runs, or from the work of the network and public figures of a device:

    sample_s = FLOPs / (0.6 x peak) + 5 x activation bytes / (0.8 x memory bandwidth)
    update_s = 10 us x operations + 5 x parameter bytes / (0.8 x memory bandwidth)

An activation is written and read in the forward pass, read in the backward pass, and its gradient
is written and read. 10 us: the latency of a network for one sample divided by its operations
(docs/planning.md says where these constants come from).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from raytrain_opt.config.load import parse_job
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.planning.cluster import ClusterSection
from raytrain_opt.recording.reader import read_lines, read_text
from raytrain_opt.recording.records import BatchSizeProbeRecord, EpochRecord
from raytrain_opt.recording.spans import SpanRecord
from raytrain_opt.search.noise_scale import pool_noise_scales

_COMPUTE_FRACTION, _MEMORY_FRACTION = 0.6, 0.8
_PASSES, _OPERATION_S = 5, 10e-6
# CUDA's context, cuDNN's workspaces and fragments; of a process on CPU, its libraries.
_RESERVED_BYTES = 1.5 * 2**30


@dataclass(frozen=True)
class Work:
    """Work of a network in training; `flops` and `activation_bytes` (fp32) of one sample."""

    parameters: int
    flops: float
    activation_bytes: float
    operations: int


@dataclass(frozen=True)
class Terms:
    """Costs of one worker, whose batch is computed by `threads` (on CPU)."""

    update_s: float
    sample_s: float
    fixed_bytes: float
    sample_bytes: float
    threads: int = 1
    epoch_s: float = 0.0
    checkpoint_s: float = 0.0  # beside the training
    busy: float = 1.0  # times as long with as many processes as cores, on CPU
    noise_scale: float | None = None
    source: str = "public figures"

    def compute_s(self, samples: float) -> float:
        """Return the seconds of an update with a batch of `samples`, without communication."""
        return self.update_s + samples * self.sample_s


def count_work(model: nn.Module, sample_shape: tuple[int, ...], num_classes: int) -> Work:
    """Count one training step of `model`, which is moved to torch's meta device."""
    samples, operations = 2, 0
    saved: dict[int, Any] = {}

    class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal operations
            operations += not func.is_view
            return func(*args, **(kwargs or {}))

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage
        return tensor

    model = model.to("meta").train()
    flops = FlopCounterMode(display=False)
    counter: Any = Counter()  # type: ignore[no-untyped-call]
    with counter, flops, torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        output = model(torch.zeros(samples, *sample_shape, device="meta"))
        labels = torch.zeros(samples, dtype=torch.long, device="meta")
        torch.nn.functional.cross_entropy(output, labels).backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        saved.pop(parameter.untyped_storage()._cdata, None)
    return Work(
        sum(parameter.numel() for parameter in model.parameters()),
        flops.get_total_flops() / samples,
        sum(storage.nbytes() for storage in saved.values()) / samples,
        operations,
    )


def state_bytes(job: Job, parameters: int) -> int:
    """Return the bytes of weights, average and optimizer state, which a checkpoint holds."""
    moments = max((2 if "Adam" in str(o.name) else 1) + o.is_schedule_free for o in job.optimizers)
    return 4 * parameters * (1 + moments + (job.average is not None))


def public_terms(job: Job, work: Work, cluster: ClusterSection) -> Terms | None:
    """Return the terms from public figures; None for CPUs, which have none here."""
    device = cluster.device
    if device is None:
        return None
    is_half = job.precision in ("bf16", "fp16") or (job.precision == "auto" and device.has_bf16)
    activation_bytes = work.activation_bytes / (2 if is_half else 1)
    peak = 1e12 * _COMPUTE_FRACTION * (device.half if is_half else device.fp32)
    bandwidth = 1e9 * _MEMORY_FRACTION * device.memory_gb_s
    gradients = 2 * 4 * work.parameters  # with the buckets of their all-reduce
    return Terms(
        work.operations * _OPERATION_S + _PASSES * 4 * work.parameters / bandwidth,
        work.flops / peak + _PASSES * activation_bytes / bandwidth,
        _RESERVED_BYTES + state_bytes(job, work.parameters) + gradients,
        activation_bytes,
    )


def measured_terms(run_dirs: Sequence[str], public: Terms | None, cores: int) -> Terms:
    """Return the terms that runs measured: probes of batch sizes, and epochs of one worker.

    Memory that no probe measured is that of `public`. `cores`: of a node. Raises JobError when
    the runs have neither.
    """
    probes, epochs, writes, points, threads = [], [], [], [], cores
    for run_dir in run_dirs:
        records = read_lines(run_dir, "batch_size.jsonl", BatchSizeProbeRecord)
        own = [(p, p.batch_size / p.samples_per_s) for p in records if p.samples_per_s]
        probes += [probe for probe, _ in own]
        steps = [(probe.batch_size, step_s) for probe, step_s in own]
        steps += [(s.batch, s.step_s) for s in measured_steps([run_dir]) if s.workers == 1]
        if steps:
            job = parse_job(read_text(run_dir, "job.yaml") or "", run_dir)
            threads = job.workers.threads or max(1, cores // job.workers.size)
        points += steps
        epochs += _trained_epochs(run_dir)
        spans = read_lines(run_dir, "timeline.jsonl", SpanRecord)
        writes += [span.duration_s for span in spans if span.command == "checkpoint"]
    if not points:
        rule = "has no probes of batch sizes (find-batch-size) and no second epoch of one worker"
        raise JobError([Problem("--measured", rule, ", ".join(run_dirs))], "plan")
    peaks = [(p.batch_size, p.peak_memory_mib * 2**20) for p in probes if p.peak_memory_mib]
    memory = fit_line(peaks) if peaks else (0.0, 0.0)
    if not peaks and public is not None:
        memory = public.fixed_bytes, public.sample_bytes
    scales = [r.noise_scale for r in epochs] + [p.noise_scale for p in probes]
    known = [scale for scale in scales if scale is not None]
    value = pool_noise_scales(known).value if known else np.inf
    return Terms(
        *fit_line(points),
        *memory,
        threads,
        median(map(_overhead_s, epochs)) if epochs else 0.0,
        median(writes) if writes else 0.0,
        noise_scale=float(value) if np.isfinite(value) else None,
        source=f"measured by {', '.join(run_dirs)}",
    )


class MeasuredStep(NamedTuple):
    """Median seconds of a run's steps, communication included."""

    workers: int
    batch: int
    step_s: float


def measured_steps(run_dirs: Sequence[str]) -> list[MeasuredStep]:
    """Return the steps of runs from their second epoch on: the first one also connects."""
    steps = []
    for run_dir in run_dirs:
        if epochs := _trained_epochs(run_dir):
            batch = parse_job(read_text(run_dir, "job.yaml") or "", run_dir).global_batch_size
            step_s = batch / median(epoch.samples_per_s for epoch in epochs)
            steps.append(MeasuredStep(epochs[0].workers, batch, step_s))
    return steps


def _trained_epochs(run_dir: str) -> list[EpochRecord]:
    """Return the epochs from the second one on, without those whose search trained all steps."""
    epochs = read_lines(run_dir, "epochs.jsonl", EpochRecord)[1:]
    return [epoch for epoch in epochs if epoch.samples_per_s]


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return intercept and slope, neither below 0, with the least squared relative errors."""
    x, y = np.array(points, dtype=float).T
    columns = np.stack([1 / y, x / y], axis=1)
    if np.ptp(x) > 0:
        intercept, slope = np.linalg.lstsq(columns, np.ones(len(x)), rcond=None)[0]
        if intercept >= 0 and slope >= 0:
            return float(intercept), float(slope)
        if slope < 0:
            return float((1 / y).sum() / (1 / y**2).sum()), 0.0
    return 0.0, float((x / y).sum() / ((x / y) ** 2).sum())


def _overhead_s(epoch: EpochRecord) -> float:
    """Return the seconds of an epoch beside its steps and the evaluation."""
    steps_s = epoch.samples / epoch.samples_per_s
    return max(0.0, (epoch.timings_s.get("main_train_s") or steps_s) - steps_s)
